// The driver's functions that launch a kernel, and the table of what stands in their place; for shadow execution and
// for copy-on-write. Launches of a graph are not among them, and a function that is not listed here may write anything.
#pragma once

#include "shadow.hpp"

namespace woodfrog::interpose {

struct LaunchArguments {
    CUfunction function;
    unsigned grid[3], block[3];
    void **parameters;
    void **extra;
    // Its parameters lie back to back in a buffer of the application's (CU_LAUNCH_PARAM_…), not behind a pointer each.
    bool in_one_buffer() const { return extra != nullptr && extra[0] != CU_LAUNCH_PARAM_END; }
};

// The arguments of a graph's kernel node. A kernel of a library stands where there is no function.
template <typename Parameters> LaunchArguments arguments_of(const Parameters &node) {
    CUfunction function = node.func;
    if constexpr (requires { node.kern; })
        if (function == nullptr)
            function = reinterpret_cast<CUfunction>(node.kern);
    return {function,
            {node.gridDimX, node.gridDimY, node.gridDimZ},
            {node.blockDimX, node.blockDimY, node.blockDimZ},
            node.kernelParams,
            node.extra};
}

// `Sink` has launched(LaunchArguments).
template <typename Sink> struct Launches {
    static constexpr auto kLaunch = [](CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned, CUstream,
                                       void **parameters, void **extra) {
        Sink::launched({function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, parameters, extra});
    };
    static constexpr auto kCooperative = [](CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned, CUstream,
                                            void **parameters) {
        Sink::launched({function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, parameters, nullptr});
    };
    static constexpr auto kLaunchEx = [](const CUlaunchConfig *config, CUfunction function, void **parameters,
                                         void **extra) {
        if (config == nullptr)
            return; // the driver refuses it
        Sink::launched({function,
                        {config->gridDimX, config->gridDimY, config->gridDimZ},
                        {config->blockDimX, config->blockDimY, config->blockDimZ},
                        parameters,
                        extra});
    };
};

// `Wrap` makes the function for the table out of what is to be called before the driver's.
template <typename Sink, template <auto, Symbol, typename> class Wrap> shadow::Overrides launch_table() {
    using All = Launches<Sink>;
    return {
        WF_WRAPPED(Wrap, cuLaunchKernel, All::kLaunch),
        WF_WRAPPED(Wrap, cuLaunchKernel_ptsz, All::kLaunch),
        WF_WRAPPED(Wrap, cuLaunchKernelEx, All::kLaunchEx),
        WF_WRAPPED(Wrap, cuLaunchKernelEx_ptsz, All::kLaunchEx),
        WF_WRAPPED(Wrap, cuLaunchCooperativeKernel, All::kCooperative),
        WF_WRAPPED(Wrap, cuLaunchCooperativeKernel_ptsz, All::kCooperative),
    };
}

} // namespace woodfrog::interpose
