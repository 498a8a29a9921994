// Everything that becomes one module in the driver.
#include "gather.cu"
#include "hash.cu"
