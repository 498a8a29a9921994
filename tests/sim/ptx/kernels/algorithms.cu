// Small programs of the kind that people write, compared with the same algorithm on the host.
extern "C" __global__ void block_reduction(const float *in, float *out, int n) {
    __shared__ float buffer[256];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    buffer[threadIdx.x] = i < n ? in[i] : 0.0f;
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        if (threadIdx.x < step)
            buffer[threadIdx.x] += buffer[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = buffer[0];
}
extern "C" __global__ void warp_reduction(const float *in, float *out) {
    float value = in[blockIdx.x * blockDim.x + threadIdx.x];
    for (int step = 16; step > 0; step /= 2)
        value += __shfl_down_sync(0xffffffffu, value, step);
    if (threadIdx.x % 32 == 0)
        out[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = value;
}
extern "C" __global__ void scan(const int *in, int *out, int n) {
    extern __shared__ int scanned[];
    const int i = threadIdx.x;
    scanned[2 * i] = 2 * i < n ? in[2 * i] : 0;
    scanned[2 * i + 1] = 2 * i + 1 < n ? in[2 * i + 1] : 0;
    int offset = 1;
    const int size = blockDim.x * 2;
    for (int d = size / 2; d > 0; d /= 2, offset *= 2) {
        __syncthreads();
        if (i < d)
            scanned[offset * (2 * i + 2) - 1] += scanned[offset * (2 * i + 1) - 1];
    }
    if (i == 0)
        scanned[size - 1] = 0;
    for (int d = 1; d < size; d *= 2) {
        offset /= 2;
        __syncthreads();
        if (i < d) {
            const int keep = scanned[offset * (2 * i + 1) - 1];
            scanned[offset * (2 * i + 1) - 1] = scanned[offset * (2 * i + 2) - 1];
            scanned[offset * (2 * i + 2) - 1] += keep;
        }
    }
    __syncthreads();
    if (2 * i < n)
        out[2 * i] = scanned[2 * i];
    if (2 * i + 1 < n)
        out[2 * i + 1] = scanned[2 * i + 1];
}
constexpr int tile = 16;
extern "C" __global__ void matrix_product(const float *a, const float *b, float *c, int n) {
    __shared__ float x[tile][tile];
    __shared__ float y[tile][tile + 1];
    const int line = blockIdx.y * tile + threadIdx.y;
    const int column = blockIdx.x * tile + threadIdx.x;
    float sum = 0.0f;
    for (int t = 0; t < (n + tile - 1) / tile; ++t) {
        const int k = t * tile;
        x[threadIdx.y][threadIdx.x] = line < n && k + threadIdx.x < n ? a[line * n + k + threadIdx.x] : 0.0f;
        y[threadIdx.y][threadIdx.x] = column < n && k + threadIdx.y < n ? b[(k + threadIdx.y) * n + column] : 0.0f;
        __syncthreads();
        for (int j = 0; j < tile; ++j)
            sum = fmaf(x[threadIdx.y][j], y[j][threadIdx.x], sum);
        __syncthreads();
    }
    if (line < n && column < n)
        c[line * n + column] = sum;
}
extern "C" __global__ void bitonic_sort(unsigned *values) {
    const unsigned i = threadIdx.x;
    for (unsigned size = 2; size <= blockDim.x; size *= 2) {
        for (unsigned step = size / 2; step > 0; step /= 2) {
            const unsigned other = i ^ step;
            if (other > i) {
                const bool up = (i & size) == 0;
                const unsigned a = values[i], b = values[other];
                if ((a > b) == up) {
                    values[i] = b;
                    values[other] = a;
                }
            }
            __syncthreads();
        }
    }
}
extern "C" __global__ void n_body(const double4 *in, double4 *out, int n, double step) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    double x = 0, y = 0, z = 0;
    for (int k = 0; k < n; ++k) {
        const double dx = in[k].x - in[i].x, dy = in[k].y - in[i].y, dz = in[k].z - in[i].z;
        const double distance = dx * dx + dy * dy + dz * dz + 0.01;
        const double force = in[k].w / (distance * sqrt(distance));
        x += dx * force;
        y += dy * force;
        z += dz * force;
    }
    out[i] = make_double4(in[i].x + x * step, in[i].y + y * step, in[i].z + z * step, in[i].w);
}
extern "C" __global__ void random_numbers(unsigned long long *states, double *out, int rounds) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long state = states[i];
    double inside = 0;
    for (int k = 0; k < rounds; ++k) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const double x = static_cast<double>(state >> 11) / 9007199254740992.0;
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const double y = static_cast<double>(state >> 11) / 9007199254740992.0;
        if (x * x + y * y < 1.0)
            inside += 1.0;
    }
    states[i] = state;
    out[i] = inside;
}
extern "C" __global__ void mandelbrot(int *out, int width, int height, int limit) {
    const int px = blockIdx.x * blockDim.x + threadIdx.x, py = blockIdx.y * blockDim.y + threadIdx.y;
    if (px >= width || py >= height)
        return;
    const double cx = -2.0 + 3.0 * px / width, cy = -1.5 + 3.0 * py / height;
    double x = 0, y = 0;
    int k = 0;
    while (k < limit && x * x + y * y <= 4.0) {
        const double keep = x * x - y * y + cx;
        y = 2.0 * x * y + cy;
        x = keep;
        ++k;
    }
    out[py * width + px] = k;
}
extern "C" __global__ void transpose(const int *in, int *out, int width, int height) {
    __shared__ int buffer[32][33];
    int x = blockIdx.x * 32 + threadIdx.x;
    int y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < width && y + j < height)
            buffer[threadIdx.y + j][threadIdx.x] = in[(y + j) * width + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x;
    y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < height && y + j < width)
            out[(y + j) * height + x] = buffer[threadIdx.x][threadIdx.y + j];
}
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = fmaf(a, x[i], y[i]);
}
extern "C" __global__ void spinning_work(unsigned *out, int rounds) {
    unsigned value = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < rounds; ++k)
        value = value * 1664525u + 1013904223u;
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
extern "C" __global__ void empty() {}
