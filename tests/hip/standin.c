// A stand-in for libamdhip64: writes each call as a line of JSON to $STANDIN_LOG and runs nothing.
//
// $STANDIN_ANSWERS   what a function returns instead of success: "hipModuleLoadData=209 ..."
// $STANDIN_PARAMS    how many bytes are read through kernelParams[0]
// $STANDIN_CAPTURING the capture status of every stream
// COPY names the copy in the log; LACKING leaves out a function that an old runtime has not.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HIP __attribute__((visibility("default"))) int

// Handles beyond 32 bits, so that a truncated one is another.
#define MODULES 0x7f1000000000ull
#define FUNCTIONS 0x7f2000000000ull

static __thread int current, last;
static int modules;

static void record(const char *format, ...) {
  const char *path = getenv("STANDIN_LOG");
  if (!path) return;
  static const char copy[] = COPY;
  char line[16384];
  int at = snprintf(line, sizeof line, "{\"copy\": \"%s\", ", copy);
  va_list arguments;
  va_start(arguments, format);
  at += vsnprintf(line + at, sizeof line - at - 2, format, arguments);
  va_end(arguments);
  strcpy(line + at, "}\n");
  FILE *file = fopen(path, "a");  // one write of one line: whole, whatever thread it comes from
  setvbuf(file, NULL, _IOFBF, sizeof line);
  fputs(line, file);
  fclose(file);
}

static int answer(const char *name) {
  const char *answers = getenv("STANDIN_ANSWERS");
  const char *found = answers ? strstr(answers, name) : NULL;
  int code = found && found[strlen(name)] == '=' ? atoi(found + strlen(name) + 1) : 0;
  if (code) last = code;
  return code;
}

static const char *hex(const unsigned char *bytes, size_t count, char *text) {
  for (size_t i = 0; i < count; i++) sprintf(text + 2 * i, "%02x", bytes[i]);
  text[2 * count] = 0;
  return text;
}

HIP hipGetDeviceCount(int *count) {
  *count = 2;
  return answer("hipGetDeviceCount");
}

HIP hipGetDevice(int *device) {
  record("\"call\": \"hipGetDevice\"");
  *device = current;
  return answer("hipGetDevice");
}

HIP hipSetDevice(int device) {
  record("\"call\": \"hipSetDevice\", \"device\": %d", device);
  int code = answer("hipSetDevice");
  if (!code) current = device;
  return code;
}

HIP hipDeviceGetAttribute(int *value, int attribute, int device) { return last = 1; }  // knows none

HIP hipRuntimeGetVersion(int *version) {
  *version = 70051831;
  return answer("hipRuntimeGetVersion");
}

HIP hipModuleLoadData(unsigned long long *module, const unsigned char *image) {
  char text[64];
  int number = __atomic_fetch_add(&modules, 1, __ATOMIC_SEQ_CST);
  record("\"call\": \"hipModuleLoadData\", \"image\": \"%s\", \"device\": %d", hex(image, 8, text),
         current);
  *module = MODULES + number;
  return answer("hipModuleLoadData");
}

HIP hipModuleGetFunction(unsigned long long *function, unsigned long long module,
                         const char *name) {
  record("\"call\": \"hipModuleGetFunction\", \"module\": %llu, \"name\": \"%s\"", module, name);
  *function = FUNCTIONS + (module - MODULES);
  return answer("hipModuleGetFunction");
}

HIP hipModuleLaunchKernel(unsigned long long function, unsigned gx, unsigned gy, unsigned gz,
                          unsigned bx, unsigned by, unsigned bz, unsigned lds,
                          unsigned long long stream, void **params, void **extra) {
  if (getenv("STANDIN_LOG")) {
    char text[8192];
    size_t size = atoi(getenv("STANDIN_PARAMS"));
    record("\"call\": \"hipModuleLaunchKernel\", \"function\": %llu, \"grid\": [%u, %u, %u], "
           "\"block\": [%u, %u, %u], \"lds\": %u, \"stream\": %llu, \"extra\": %d, "
           "\"device\": %d, \"params\": \"%s\"",
           function, gx, gy, gz, bx, by, bz, lds, stream, extra != NULL, current,
           hex(params[0], size, text));
  }
  return answer("hipModuleLaunchKernel");
}

#ifndef LACKING
HIP hipStreamIsCapturing(unsigned long long stream, int *status) {
  const char *capturing = getenv("STANDIN_CAPTURING");
  record("\"call\": \"hipStreamIsCapturing\", \"stream\": %llu", stream);
  *status = capturing ? atoi(capturing) : 0;
  return answer("hipStreamIsCapturing");
}
#endif

HIP hipPeekAtLastError(void) { return last; }

HIP hipGetLastError(void) {
  int code = last;
  last = 0;
  return code;
}

__attribute__((visibility("default"))) const char *hipGetErrorName(int code) {
  switch (code) {
    case 2: return "hipErrorOutOfMemory";
    case 100: return "hipErrorNoDevice";
    case 209: return "hipErrorNoBinaryForGpu";
    case 500: return "hipErrorNotFound";
    case 709: return "hipErrorContextIsDestroyed";
    case 906: return "hipErrorStreamCaptureImplicit";
  }
  return NULL;
}

__attribute__((visibility("default"))) const char *hipGetErrorString(int code) {
  return code == 709 ? "context is destroyed" : hipGetErrorName(code);
}
