// The kernel of launch_loop: as little work as a kernel can do and still be seen to have run.
extern "C" __global__ void tick(unsigned long long *counter) {
    *counter += 1;
}
