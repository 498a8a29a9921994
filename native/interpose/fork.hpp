// What a forked child must forget.
#pragma once

namespace woodfrog::interpose {

void install_fork_handlers();

} // namespace woodfrog::interpose
