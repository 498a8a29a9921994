// cuInit, versions and devices.
#include <cstdio>
#include <cstring>

#include <cuda.h>

#include "accounting.hpp"
#include "api.hpp"
#include "config.hpp"
#include "device.hpp"

using namespace simgpu;

extern "C" {

CUresult CUDAAPI cuInit(unsigned int flags) {
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    try {
        return static_cast<CUresult>(initialise_process());
    } catch (const Error &error) {
        return error.code;
    } catch (const std::exception &) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    if (version == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    *version = config().driver_version;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    return call([&] {
        require(count != nullptr);
        *count = static_cast<int>(devices().size());
    });
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    return call([&] {
        require(device != nullptr);
        device_at(ordinal);
        *device = ordinal;
    });
}

CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice device) {
    return call([&] {
        require(name != nullptr && length > 0);
        const bool mig = device_at(device).mig;
        std::snprintf(name, static_cast<size_t>(length), "woodfrog simulated GPU%s", mig ? " MIG 1g.10gb" : "");
    });
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    return call([&] {
        require(uuid != nullptr);
        *uuid = uuid_of_index(device_at(device).index);
    });
}

CUresult CUDAAPI cuDeviceGetLuid(char *, unsigned int *, CUdevice) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    return call([&] {
        require(bytes != nullptr);
        device_at(device);
        *bytes = config().memory_size_bytes;
    });
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return call([&] {
        require(value != nullptr);
        *value = device_attribute(device_at(device).index, attribute);
    });
}

CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    return call([&] {
        require(major != nullptr && minor != nullptr);
        int index = device_at(device).index;
        *major = device_attribute(index, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        *minor = device_attribute(index, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    });
}

CUresult CUDAAPI cuDeviceGetProperties(CUdevprop *properties, CUdevice device) {
    return call([&] {
        require(properties != nullptr);
        device_at(device);
        *properties = {kMaxThreadsPerBlock,
                       {1024, 1024, 64},
                       {2147483647, 65535, 65535},
                       kSharedPerBlock,
                       65536,
                       32,
                       2147483647,
                       65536,
                       1000000,
                       512};
    });
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    return call([&] {
        require(text != nullptr && length > 0);
        std::snprintf(text, static_cast<size_t>(length), "%s", pci_bus_id(device_at(device).index).c_str());
    });
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    return call([&] {
        require(device != nullptr && text != nullptr);
        for (size_t i = 0; i < devices().size(); ++i) {
            std::string full = pci_bus_id(devices()[i].index);
            // Domain and function may be left out: "0000:10:00.0", "10:00.0", "10:00".
            if (full == text || full.substr(5) == text || full.substr(5, 5) == text) {
                *device = static_cast<CUdevice>(i);
                return;
            }
        }
        throw Error{CUDA_ERROR_INVALID_DEVICE};
    });
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    return call([&] {
        require(can != nullptr);
        device_at(device);
        device_at(peer);
        *can = device != peer;
    });
}

CUresult CUDAAPI cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer) {
    return call([&] {
        require(value != nullptr);
        device_at(device);
        require(device_at(peer).index != device_at(device).index, CUDA_ERROR_INVALID_DEVICE);
        *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
    });
}

CUresult CUDAAPI cuDeviceGetTexture1DLinearMaxWidth(size_t *, CUarray_format, unsigned, CUdevice) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType, CUdevice device) {
    return call([&] {
        require(supported != nullptr);
        device_at(device);
        *supported = 0;
    });
}

CUresult CUDAAPI cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    return call_in_context([&](Context &context) {
        size_t total = config().memory_size_bytes;
        size_t used = used_bytes(device_at(context.device).index);
        put(free_bytes, used < total ? total - used : 0);
        put(total_bytes, total);
    });
}

} // extern "C"
