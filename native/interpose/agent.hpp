// The agent: the one thread of ours in the application, which does what the node daemon asks (native/wire/wire.h).
#pragma once

namespace woodfrog::interpose {

// Starts the agent once; later calls do nothing. Called when cuInit has succeeded.
void start_agent();

} // namespace woodfrog::interpose
