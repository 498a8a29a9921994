// Where a library in another process refers to a function of another library: read from its dynamic section, which is
// the process's own memory and may say anything.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

namespace woodfrog::enter {

// The address of the pointer through which the process's libcuda calls `function` (its slot in the procedure linkage
// table), if that can be written. Nothing, and `why_not` as a sentence for people, when there is none.
std::optional<std::uintptr_t> driver_reference(pid_t pid, const std::string &function, std::string &why_not);

// Whether what is in such a reference is the function, and not yet the driver's own code that looks for it.
bool is_resolved(pid_t pid, std::uintptr_t value);

} // namespace woodfrog::enter
