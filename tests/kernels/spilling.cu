// Not part of any program: what the build must refuse, an array that cannot stay in registers.
__global__ void __launch_bounds__(64) Spills(float* data, int n) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = data[i];
  for (int i = 0; i < n; ++i) kept[i % 64] *= kept[i];
  for (int i = 0; i < 64; ++i) data[i] = kept[i];
}
