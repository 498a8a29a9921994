// heat: the heat equation on a cube by implicit time steps, each solved with conjugate gradients. Many small launches,
// and after each the host decides from a number in pinned memory. Linked with the static CUDA runtime.
//
//   --steps N (100)      time steps, each of --iterations M (20) conjugate gradient iterations
//   --side L             grid points a side (overrides --state-gib)
//   --state-gib X (0.25) GPU state from which the grid follows
//   --log FILE, --pace-ms T
//
// Sums are reduced as a fixed tree, so every residual is the same to the last bit in every run.
#include <algorithm>
#include <cmath>

#include "runtime_support.hpp"

namespace {

constexpr int kThreads = 256;
constexpr int kArrays = 5;         // temperature, right-hand side, residual, direction, product
constexpr double kDiffusion = 0.7; // diffusivity times time step over the square of the grid spacing
constexpr int kPartialSums = 1024; // blocks of a reduction: fixed, for a fixed order of additions

__global__ void set_up(double *temperature, int side) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t points = static_cast<size_t>(side) * side * side;
    if (i >= points)
        return;
    const int x = static_cast<int>(i % side);
    const int y = static_cast<int>(i / side % side);
    const int z = static_cast<int>(i / side / side);
    // A few warm blocks on a cold floor, with no symmetry.
    temperature[i] =
        ((x * 7 / side) + 2 * (y * 5 / side) + 3 * (z * 3 / side)) % 4 + 1e-3 * ((x * 31 + y * 17 + z) % 64);
}

// product = (1 + diffusion * (6 - neighbours)) * vector, with walls held at zero.
__global__ void apply(const double *vector, double *product, int side) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t plane = static_cast<size_t>(side) * side;
    if (i >= plane * side)
        return;
    const int x = static_cast<int>(i % side);
    const int y = static_cast<int>(i / side % side);
    const int z = static_cast<int>(i / plane);
    double around = 0.0;
    around += x > 0 ? vector[i - 1] : 0.0;
    around += x + 1 < side ? vector[i + 1] : 0.0;
    around += y > 0 ? vector[i - side] : 0.0;
    around += y + 1 < side ? vector[i + side] : 0.0;
    around += z > 0 ? vector[i - plane] : 0.0;
    around += z + 1 < side ? vector[i + plane] : 0.0;
    product[i] = (1.0 + 6.0 * kDiffusion) * vector[i] - kDiffusion * around;
}

// a = b + factor * c
__global__ void combine(double *a, const double *b, double factor, const double *c, size_t points) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < points)
        a[i] = b[i] + factor * c[i];
}

__global__ void partial_dot(const double *a, const double *b, double *sums, size_t points) {
    __shared__ double partial[kThreads];
    double sum = 0.0;
    for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < points;
         i += static_cast<size_t>(kPartialSums) * kThreads)
        sum += b == nullptr ? a[i] : a[i] * b[i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int width = kThreads / 2; width > 0; width /= 2) {
        if (threadIdx.x < width)
            partial[threadIdx.x] += partial[threadIdx.x + width];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        sums[blockIdx.x] = partial[0];
}

class Solver {
  public:
    explicit Solver(int side) : side_(side), points_(static_cast<size_t>(side) * side * side) {
        for (double **array : {&temperature_, &right_, &residual_, &direction_, &product_})
            TARGET_CHECK(cudaMalloc(array, points_ * sizeof(double)));
        TARGET_CHECK(cudaMalloc(&sums_, kPartialSums * sizeof(double)));
        TARGET_CHECK(cudaMallocHost(&host_sums_, kPartialSums * sizeof(double)));
        TARGET_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        TARGET_CHECK(cudaEventCreateWithFlags(&arrived_, cudaEventDisableTiming));
        set_up<<<blocks(), kThreads, 0, stream_>>>(temperature_, side_);
        TARGET_CHECK_LAUNCH();
    }

    // One implicit time step; returns the square of the residual's norm after the last iteration.
    double time_step(uint64_t iterations) {
        copy(right_, temperature_);
        product_of(temperature_);
        axpy(residual_, right_, -1.0, product_);
        copy(direction_, residual_);
        double rho = dot(residual_, residual_);
        for (uint64_t i = 0; i < iterations && rho > 0.0; ++i) {
            product_of(direction_);
            const double alpha = rho / dot(direction_, product_);
            axpy(temperature_, temperature_, alpha, direction_);
            axpy(residual_, residual_, -alpha, product_);
            const double next = dot(residual_, residual_);
            axpy(direction_, residual_, next / rho, direction_);
            rho = next;
        }
        return rho;
    }

    double heat() { return dot(temperature_, nullptr); }
    double norm() { return dot(temperature_, temperature_); }
    uint64_t state_bytes() const { return kArrays * points_ * sizeof(double); }

  private:
    unsigned blocks() const { return static_cast<unsigned>((points_ + kThreads - 1) / kThreads); }

    void copy(double *to, const double *from) {
        TARGET_CHECK(cudaMemcpyAsync(to, from, points_ * sizeof(double), cudaMemcpyDeviceToDevice, stream_));
    }
    void product_of(const double *vector) {
        apply<<<blocks(), kThreads, 0, stream_>>>(vector, product_, side_);
        TARGET_CHECK_LAUNCH();
    }
    void axpy(double *a, const double *b, double factor, const double *c) {
        combine<<<blocks(), kThreads, 0, stream_>>>(a, b, factor, c, points_);
        TARGET_CHECK_LAUNCH();
    }
    double dot(const double *a, const double *b) {
        partial_dot<<<kPartialSums, kThreads, 0, stream_>>>(a, b, sums_, points_);
        TARGET_CHECK_LAUNCH();
        TARGET_CHECK(
            cudaMemcpyAsync(host_sums_, sums_, kPartialSums * sizeof(double), cudaMemcpyDeviceToHost, stream_));
        TARGET_CHECK(cudaEventRecord(arrived_, stream_));
        TARGET_CHECK(cudaEventSynchronize(arrived_));
        double sum = 0.0;
        for (int i = 0; i < kPartialSums; ++i)
            sum += host_sums_[i];
        return sum;
    }

    int side_;
    size_t points_;
    double *temperature_ = nullptr;
    double *right_ = nullptr;
    double *residual_ = nullptr;
    double *direction_ = nullptr;
    double *product_ = nullptr;
    double *sums_ = nullptr;
    double *host_sums_ = nullptr;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t arrived_ = nullptr;
};

} // namespace

int main(int argc, char **argv) {
    const target::Options options(argc, argv,
                                  {{"steps", "100"}, {"iterations", "20"}, {"side", "0"}, {"state-gib", "0.25"}});
    const target::Log log(options.text("log"));
    const uint64_t steps = options.count("steps");
    double side = options.real("side");
    if (side == 0.0)
        side = std::max(8.0, std::floor(std::cbrt(options.real("state-gib") * 1073741824.0 / 8.0 / kArrays)));
    if (side < 4.0 || side > 1600.0)
        target::fail("the grid must have between 4 and 1600 points a side");

    Solver solver(static_cast<int>(side));
    const double start_heat = solver.heat();
    log.start("heat", solver.state_bytes());
    target::Digest digest;
    for (uint64_t step = 1; step <= steps; ++step) {
        const double rho = solver.time_step(options.count("iterations"));
        const double heat = solver.heat();
        if (!std::isfinite(rho) || !(heat > 0.0) || heat > 1.01 * start_heat)
            target::fail("the solution is out of bounds: heat must fall towards the cold walls");
        digest.add(rho);
        digest.add(heat);
        log.step(step, target::hex(digest.value()));
        target::pace(options.real("pace-ms"));
    }
    digest.add(solver.norm());
    log.done(steps, digest.value());
    return 0;
}
