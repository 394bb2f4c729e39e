// What tests call beside torch_npu, by ctypes.

#include "knobs.h"
#include "memory.h"
#include "stream.h"

using namespace npu_sim;

extern "C" {

// 0, or 1 if there is no such knob.
int npu_sim_set(const char* knob, long value) { return knobs().set(knob, value) ? 0 : 1; }

// -1 if there is no such counter.
long npu_sim_count(const char* counter) { return counters().get(counter); }

void npu_sim_hold(void* stream, int on) { static_cast<Stream*>(stream)->hold(on != 0); }

void npu_sim_settle() { settle(); }

// 0: ordinary host memory, 1: page-locked, 2: device.
int npu_sim_place(const void* address, size_t n_bytes) {
    switch (memory().place(address, n_bytes)) {
        case Place::kHost: return 1;
        case Place::kDevice: return 2;
        case Place::kUnknown: break;
    }
    return 0;
}

}  // extern "C"
