// The uniform wrappers: one for each function of the driver that no other file here answers, written by generate.py
// from the headers. Each goes through the gate and calls the real function with the same arguments.
#include "driver.hpp"
#include "gate.hpp"

using namespace woodfrog::interpose;

#include "gated.inc"
