// Stands for libcuda.so.1, so that the wheels of CUDA code load where no driver is installed.
// Every function succeeds and does nothing: what a kernel would do is done by references in Python.
#define DO_NOTHING(name) int name(void) { return 0; }

DO_NOTHING(cuInit)
DO_NOTHING(cuCtxFromGreenCtx)
DO_NOTHING(cuCtxPopCurrent_v2)
DO_NOTHING(cuCtxPushCurrent_v2)
DO_NOTHING(cuDevResourceGenerateDesc)
DO_NOTHING(cuDevSmResourceSplitByCount)
DO_NOTHING(cuDeviceGet)
DO_NOTHING(cuDeviceGetAttribute)
DO_NOTHING(cuDeviceGetDevResource)
DO_NOTHING(cuDeviceGetName)
DO_NOTHING(cuGetErrorString)
DO_NOTHING(cuGetProcAddress_v2)
DO_NOTHING(cuGreenCtxCreate)
DO_NOTHING(cuGreenCtxDestroy)
DO_NOTHING(cuGreenCtxGetDevResource)
DO_NOTHING(cuPointerGetAttribute)
DO_NOTHING(cuStreamCreate)

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}
