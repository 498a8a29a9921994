// A network with one hidden layer, trained with Adam on one batch: the demo's own kernels, compiled by NVRTC.
//
// Every sum is taken in a fixed order by one thread and nothing is atomic, so that two runs agree to the last bit; the
// demo's comparison is worth nothing otherwise. Parameters lie in one array: W1[2][HIDDEN], b1[HIDDEN], W2[HIDDEN], b2.
// SAMPLES, HIDDEN and PARAMETERS come from the command line of the compiler.

// Lives in the module and not in an allocation: the driver's own part of a checkpoint has to bring it back.
__device__ unsigned int steps_done;

extern "C" __global__ void make_data(float* inputs, float* wanted) {
    const int sample = blockIdx.x * blockDim.x + threadIdx.x;
    if (sample >= SAMPLES)
        return;
    // A low-discrepancy point of the square, and a ring that no linear model can separate.
    const float x = 2.0f * (sample * 0.754877666f - floorf(sample * 0.754877666f)) - 1.0f;
    const float y = 2.0f * (sample * 0.569840291f - floorf(sample * 0.569840291f)) - 1.0f;
    inputs[2 * sample] = x;
    inputs[2 * sample + 1] = y;
    wanted[sample] = x * x + y * y < 0.5f ? 1.0f : -1.0f;
}

extern "C" __global__ void make_parameters(float* parameters, float* first, float* second) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= PARAMETERS)
        return;
    unsigned int bits = index * 2654435761u + 12345u;
    bits ^= bits >> 16;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    parameters[index] = (bits & 0xffff) / 32768.0f - 1.0f;
    first[index] = 0.0f;
    second[index] = 0.0f;
}

// hidden[sample][HIDDEN] and error[sample] of the whole batch, one thread a sample.
extern "C" __global__ void forward(const float* parameters, const float* inputs, const float* wanted, float* hidden,
                                   float* error) {
    const int sample = blockIdx.x * blockDim.x + threadIdx.x;
    if (sample >= SAMPLES)
        return;
    const float x = inputs[2 * sample], y = inputs[2 * sample + 1];
    float sum = parameters[4 * HIDDEN];
    for (int unit = 0; unit < HIDDEN; ++unit) {
        const float before = parameters[unit] * x + parameters[HIDDEN + unit] * y + parameters[2 * HIDDEN + unit];
        const float after = before / (1.0f + fabsf(before)); // softsign: no table of a math library is involved
        hidden[sample * HIDDEN + unit] = after;
        sum += parameters[3 * HIDDEN + unit] * after;
    }
    error[sample] = sum - wanted[sample];
}

// d loss / d parameter, one thread a parameter, samples in order.
extern "C" __global__ void backward(const float* parameters, const float* inputs, const float* hidden,
                                    const float* error, float* gradient) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= PARAMETERS)
        return;
    const int group = index / HIDDEN, unit = index % HIDDEN;
    float sum = 0.0f;
    for (int sample = 0; sample < SAMPLES; ++sample) {
        float term = error[sample];
        if (index < 4 * HIDDEN) {
            const float after = hidden[sample * HIDDEN + unit];
            if (group == 3) {
                term *= after;
            } else {
                const float slope = 1.0f - fabsf(after);
                term *= parameters[3 * HIDDEN + unit] * slope * slope;
                if (group < 2)
                    term *= inputs[2 * sample + group];
            }
        }
        sum += term;
    }
    gradient[index] = 2.0f * sum / SAMPLES;
}

// One step of Adam; the trajectory keeps every step's parameters, so that the end tells of the whole way.
extern "C" __global__ void adam(float* parameters, float* first, float* second, const float* gradient,
                                float* trajectory, float first_correction, float second_correction) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= PARAMETERS)
        return;
    const float slope = gradient[index];
    first[index] = 0.9f * first[index] + 0.1f * slope;
    second[index] = 0.999f * second[index] + 0.001f * slope * slope;
    parameters[index] -=
        0.02f * (first[index] * first_correction) / (sqrtf(second[index] * second_correction) + 1e-8f);
    trajectory[(size_t)steps_done * PARAMETERS + index] = parameters[index];
}

// Mean squared error of the batch, and the count of steps, by one thread.
extern "C" __global__ void finish_step(const float* error, float* report) {
    float sum = 0.0f;
    for (int sample = 0; sample < SAMPLES; ++sample)
        sum += error[sample] * error[sample];
    report[0] = sum / SAMPLES;
    steps_done += 1;
    report[1] = (float)steps_done;
}
