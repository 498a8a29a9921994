// md: molecular dynamics of a Lennard-Jones solid that melts, with cell lists, in double precision (the kind of code
// that CoMD stands for). Linked with the shared CUDA runtime.
//
//   --steps N (100)     logged steps, each of --substeps M (10) velocity-Verlet time steps
//   --cells-per-side C  face-centred cubic unit cells a side, 4 C^3 atoms (overrides --state-gib)
//   --state-gib X (0.5) GPU state from which the number of atoms follows
//   --log FILE, --pace-ms T, --seed S
//
// Every result is the same to the last bit in every run: atoms enter a cell in any order but are then sorted by number,
// forces are summed in that order, energies are reduced as a fixed tree, and the checksum is made of integers.
#include <algorithm>
#include <cmath>

#include "runtime_support.hpp"

namespace {

constexpr double kDensity = 0.8442;   // reduced density of the usual Lennard-Jones melt benchmark
constexpr double kCutoff = 2.5;       // in units of sigma, the usual truncation
constexpr double kTimeStep = 0.002;   // in reduced units
constexpr double kTemperature = 1.44; // start: twice the triple point's, so that the crystal melts
constexpr int kCellCapacity = 64;     // a full cell holds about 14 atoms at this density
constexpr int kThreads = 128;
constexpr double kBytesPerAtom = 3 * 24 + 8 + 4.0 * kCellCapacity / 13.0 + 4; // arrays below, cells by their share

struct Box {
    double side;      // of the periodic cube
    int cells;        // per side
    double cell_side; // at least kCutoff
};

struct Vector {
    double x, y, z;
};

__host__ __device__ inline unsigned long long mixed(unsigned long long x) {
    x += 0x9e3779b97f4a7c15ULL; // SplitMix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

__device__ inline double uniform(unsigned long long key) {
    return static_cast<double>(mixed(key) >> 11) * (1.0 / 9007199254740992.0); // 53 bits
}

__global__ void place_atoms(Vector *position, Vector *velocity, int per_side, double lattice, double speed,
                            unsigned long long seed, int atoms) {
    const int atom = blockIdx.x * blockDim.x + threadIdx.x;
    if (atom >= atoms)
        return;
    const int corner = atom % 4;
    const int cell = atom / 4;
    const double x = cell % per_side;
    const double y = (cell / per_side) % per_side;
    const double z = cell / (per_side * per_side);
    // The four atoms of a face-centred cubic unit cell, moved off the cell borders.
    position[atom] = {(x + 0.25 + (corner == 1 || corner == 2 ? 0.5 : 0.0)) * lattice,
                      (y + 0.25 + (corner == 1 || corner == 3 ? 0.5 : 0.0)) * lattice,
                      (z + 0.25 + (corner == 2 || corner == 3 ? 0.5 : 0.0)) * lattice};
    const unsigned long long key = seed * 0x100000001b3ULL + 3ULL * static_cast<unsigned long long>(atom);
    velocity[atom] = {(2.0 * uniform(key) - 1.0) * speed, (2.0 * uniform(key + 1) - 1.0) * speed,
                      (2.0 * uniform(key + 2) - 1.0) * speed};
}

// First half of velocity Verlet: half a kick, a drift, and back into the box.
__global__ void kick_and_drift(Vector *position, Vector *velocity, const Vector *force, double side, int atoms) {
    const int atom = blockIdx.x * blockDim.x + threadIdx.x;
    if (atom >= atoms)
        return;
    Vector v = velocity[atom];
    Vector p = position[atom];
    const Vector f = force[atom];
    v = {v.x + 0.5 * kTimeStep * f.x, v.y + 0.5 * kTimeStep * f.y, v.z + 0.5 * kTimeStep * f.z};
    p = {p.x + kTimeStep * v.x, p.y + kTimeStep * v.y, p.z + kTimeStep * v.z};
    p.x -= side * floor(p.x / side);
    p.y -= side * floor(p.y / side);
    p.z -= side * floor(p.z / side);
    velocity[atom] = v;
    position[atom] = p;
}

__device__ inline int cell_coordinate(double x, const Box box) {
    const int cell = static_cast<int>(x / box.cell_side);
    return cell < box.cells ? cell : box.cells - 1; // rounding can put an atom on the far border
}

// Puts every atom's number into its cell, in whatever order the threads come; sort_cells then makes the order certain.
__global__ void fill_cells(const Vector *position, int *count, int *member, const Box box, int atoms) {
    const int atom = blockIdx.x * blockDim.x + threadIdx.x;
    if (atom >= atoms)
        return;
    const Vector p = position[atom];
    const int cell =
        (cell_coordinate(p.z, box) * box.cells + cell_coordinate(p.y, box)) * box.cells + cell_coordinate(p.x, box);
    const int slot = atomicAdd(&count[cell], 1);
    if (slot < kCellCapacity) // a cell that is too full is seen in its count
        member[static_cast<size_t>(cell) * kCellCapacity + slot] = atom;
}

__global__ void sort_cells(const int *count, int *member, int cells, int *overflow) {
    const int cell = blockIdx.x * blockDim.x + threadIdx.x;
    if (cell >= cells)
        return;
    const int atoms = count[cell];
    if (atoms > kCellCapacity) {
        *overflow = 1;
        return;
    }
    int *list = member + static_cast<size_t>(cell) * kCellCapacity;
    for (int i = 1; i < atoms; ++i) {
        const int atom = list[i];
        int j = i - 1;
        for (; j >= 0 && list[j] > atom; --j)
            list[j + 1] = list[j];
        list[j + 1] = atom;
    }
}

__device__ inline double nearest(double difference, double side) {
    return difference - side * rint(difference / side);
}

// Force on and potential energy of each atom, and the second half kick. One thread an atom; the neighbours come in a
// fixed order, so the sums do too.
__global__ void forces_and_kick(const Vector *position, Vector *velocity, Vector *force, double *energy,
                                const int *count, const int *member, const Box box, bool kick, int atoms) {
    const int atom = blockIdx.x * blockDim.x + threadIdx.x;
    if (atom >= atoms)
        return;
    const Vector p = position[atom];
    const int cx = cell_coordinate(p.x, box);
    const int cy = cell_coordinate(p.y, box);
    const int cz = cell_coordinate(p.z, box);
    Vector f = {0.0, 0.0, 0.0};
    double potential = 0.0;
    for (int dz = -1; dz <= 1; ++dz) {
        for (int dy = -1; dy <= 1; ++dy) {
            for (int dx = -1; dx <= 1; ++dx) {
                const int x = (cx + dx + box.cells) % box.cells;
                const int y = (cy + dy + box.cells) % box.cells;
                const int z = (cz + dz + box.cells) % box.cells;
                const int cell = (z * box.cells + y) * box.cells + x;
                const int *list = member + static_cast<size_t>(cell) * kCellCapacity;
                const int inside = min(count[cell], kCellCapacity);
                for (int i = 0; i < inside; ++i) {
                    const int other = list[i];
                    if (other == atom)
                        continue;
                    const Vector q = position[other];
                    const double rx = nearest(p.x - q.x, box.side);
                    const double ry = nearest(p.y - q.y, box.side);
                    const double rz = nearest(p.z - q.z, box.side);
                    const double r2 = rx * rx + ry * ry + rz * rz;
                    if (r2 >= kCutoff * kCutoff)
                        continue;
                    const double inverse2 = 1.0 / r2;
                    const double inverse6 = inverse2 * inverse2 * inverse2;
                    const double pull = 24.0 * inverse2 * inverse6 * (2.0 * inverse6 - 1.0);
                    f = {f.x + pull * rx, f.y + pull * ry, f.z + pull * rz};
                    potential += 2.0 * inverse6 * (inverse6 - 1.0); // half of 4(...): each pair is met twice
                }
            }
        }
    }
    force[atom] = f;
    Vector v = velocity[atom];
    if (kick) {
        v = {v.x + 0.5 * kTimeStep * f.x, v.y + 0.5 * kTimeStep * f.y, v.z + 0.5 * kTimeStep * f.z};
        velocity[atom] = v;
    }
    energy[atom] = potential + 0.5 * (v.x * v.x + v.y * v.y + v.z * v.z);
}

constexpr int kSumThreads = 256;

// One block adds a slice of `values` as a fixed tree; called twice, it adds everything.
__global__ void sum_slices(const double *values, double *sums, int total, int slice) {
    __shared__ double partial[kSumThreads];
    const int begin = blockIdx.x * slice;
    const int end = min(begin + slice, total);
    double sum = 0.0;
    for (int i = begin + threadIdx.x; i < end; i += kSumThreads)
        sum += values[i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int width = kSumThreads / 2; width > 0; width /= 2) {
        if (threadIdx.x < width)
            partial[threadIdx.x] += partial[threadIdx.x + width];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        sums[blockIdx.x] = partial[0];
}

// Adds up the bits of all positions and velocities, each weighted by its place: exact whatever the order of the adds.
__global__ void checksum(const Vector *position, const Vector *velocity, unsigned long long *sum, int atoms) {
    const int atom = blockIdx.x * blockDim.x + threadIdx.x;
    if (atom >= atoms)
        return;
    const double values[6] = {position[atom].x, position[atom].y, position[atom].z,
                              velocity[atom].x, velocity[atom].y, velocity[atom].z};
    unsigned long long own = 0;
    for (int i = 0; i < 6; ++i)
        own += static_cast<unsigned long long>(__double_as_longlong(values[i])) *
               (2ULL * (6ULL * static_cast<unsigned long long>(atom) + static_cast<unsigned long long>(i)) + 1ULL);
    atomicAdd(sum, own);
}

class Simulation {
  public:
    Simulation(int per_side, uint64_t seed) : atoms_(4 * per_side * per_side * per_side) {
        const double lattice = std::cbrt(4.0 / kDensity);
        box_.side = per_side * lattice;
        box_.cells = static_cast<int>(box_.side / kCutoff);
        if (box_.cells < 3)
            target::fail("the box is smaller than three cut-off lengths: --cells-per-side must be at least 5");
        box_.cell_side = box_.side / box_.cells;
        cells_ = box_.cells * box_.cells * box_.cells;
        slices_ = (atoms_ + kSlice - 1) / kSlice;
        allocate(&position_, atoms_);
        allocate(&velocity_, atoms_);
        allocate(&force_, atoms_);
        allocate(&energy_, atoms_);
        allocate(&slice_sums_, slices_);
        allocate(&total_, 1);
        allocate(&count_, cells_);
        allocate(&member_, static_cast<size_t>(cells_) * kCellCapacity);
        allocate(&overflow_, 1);
        allocate(&checksum_, 1);
        TARGET_CHECK(cudaMemset(overflow_, 0, sizeof *overflow_));
        // Uniform velocities of this width have the variance kTemperature.
        place_atoms<<<blocks(atoms_), kThreads>>>(position_, velocity_, per_side, lattice,
                                                  std::sqrt(3.0 * kTemperature), seed, atoms_);
        TARGET_CHECK_LAUNCH();
        forces(false);
    }

    void time_step() {
        kick_and_drift<<<blocks(atoms_), kThreads>>>(position_, velocity_, force_, box_.side, atoms_);
        TARGET_CHECK_LAUNCH();
        forces(true);
    }

    // The total energy; also the point where trouble on the GPU shows.
    double energy() {
        sum_slices<<<slices_, kSumThreads>>>(energy_, slice_sums_, atoms_, kSlice);
        TARGET_CHECK_LAUNCH();
        sum_slices<<<1, kSumThreads>>>(slice_sums_, total_, slices_, slices_);
        TARGET_CHECK_LAUNCH();
        double total = 0.0;
        int overflow = 0;
        TARGET_CHECK(cudaMemcpy(&total, total_, sizeof total, cudaMemcpyDeviceToHost));
        TARGET_CHECK(cudaMemcpy(&overflow, overflow_, sizeof overflow, cudaMemcpyDeviceToHost));
        if (overflow != 0 || !std::isfinite(total))
            target::fail("the simulation is out of bounds: a cell overflowed or the energy is not finite");
        return total;
    }

    uint64_t state_checksum() {
        TARGET_CHECK(cudaMemset(checksum_, 0, sizeof *checksum_));
        checksum<<<blocks(atoms_), kThreads>>>(position_, velocity_, checksum_, atoms_);
        TARGET_CHECK_LAUNCH();
        unsigned long long sum = 0;
        TARGET_CHECK(cudaMemcpy(&sum, checksum_, sizeof sum, cudaMemcpyDeviceToHost));
        return sum;
    }

    int atoms() const { return atoms_; }
    uint64_t state_bytes() const { return state_bytes_; }

  private:
    static constexpr int kSlice = 4096; // energies added by one block

    template <typename T> void allocate(T **pointer, size_t elements) {
        TARGET_CHECK(cudaMalloc(pointer, elements * sizeof(T)));
        state_bytes_ += elements * sizeof(T);
    }

    static int blocks(int elements) { return (elements + kThreads - 1) / kThreads; }

    void forces(bool kick) {
        TARGET_CHECK(cudaMemsetAsync(count_, 0, static_cast<size_t>(cells_) * sizeof *count_));
        fill_cells<<<blocks(atoms_), kThreads>>>(position_, count_, member_, box_, atoms_);
        TARGET_CHECK_LAUNCH();
        sort_cells<<<blocks(cells_), kThreads>>>(count_, member_, cells_, overflow_);
        TARGET_CHECK_LAUNCH();
        forces_and_kick<<<blocks(atoms_), kThreads>>>(position_, velocity_, force_, energy_, count_, member_, box_,
                                                      kick, atoms_);
        TARGET_CHECK_LAUNCH();
    }

    int atoms_;
    int cells_ = 0;
    int slices_ = 0;
    Box box_{};
    uint64_t state_bytes_ = 0;
    Vector *position_ = nullptr;
    Vector *velocity_ = nullptr;
    Vector *force_ = nullptr;
    double *energy_ = nullptr;
    double *slice_sums_ = nullptr;
    double *total_ = nullptr;
    int *count_ = nullptr;
    int *member_ = nullptr;
    int *overflow_ = nullptr;
    unsigned long long *checksum_ = nullptr;
};

} // namespace

int main(int argc, char **argv) {
    const target::Options options(
        argc, argv, {{"steps", "100"}, {"substeps", "10"}, {"cells-per-side", "0"}, {"state-gib", "0.5"}});
    const target::Log log(options.text("log"));
    const uint64_t steps = options.count("steps");
    const uint64_t substeps = options.count("substeps");
    double per_side = options.real("cells-per-side");
    if (per_side == 0.0)
        per_side = std::max(5.0, std::floor(std::cbrt(options.real("state-gib") * 1073741824.0 / kBytesPerAtom / 4.0)));
    if (per_side > 800.0) // 2 billion atoms: beyond the 32-bit atom numbers used here
        target::fail("the simulation is limited to 800 unit cells a side");

    Simulation simulation(static_cast<int>(per_side), options.count("seed"));
    const double start_energy = simulation.energy();
    log.start("md", simulation.state_bytes(), ", \"atoms\": " + std::to_string(simulation.atoms()));
    target::Digest digest;
    double energy = start_energy;
    for (uint64_t step = 1; step <= steps; ++step) {
        for (uint64_t i = 0; i < substeps; ++i)
            simulation.time_step();
        energy = simulation.energy();
        digest.add(energy);
        log.step(step, target::hex(energy));
        target::pace(options.real("pace-ms"));
    }
    digest.add(simulation.state_checksum());
    char drift[40];
    std::snprintf(drift, sizeof drift, "%.3e", std::abs(energy / start_energy - 1.0));
    log.done(steps, digest.value(), std::string(", \"energy_drift\": ") + drift);
    return 0;
}
