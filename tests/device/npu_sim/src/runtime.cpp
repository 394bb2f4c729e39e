// Devices, memory, streams and events of AscendCL's runtime. The compiler holds each signature against the headers
// that the wheel ships.

#include <cstdio>
#include <cstring>

#include "acl/acl.h"
#include "acl/acl_rt.h"
#include "acl/error_codes/rt_error_codes.h"
#include "knobs.h"
#include "memory.h"
#include "stream.h"

using namespace npu_sim;

namespace {

constexpr size_t kDeviceNbytes = size_t{8} << 30;
constexpr int64_t kCores = 24;

thread_local int32_t current_device = -1;
int context;  // its address is the handle of the only context

Stream* stream_of(aclrtStream handle) { return static_cast<Stream*>(handle); }
Event& event_of(aclrtEvent handle) { return *static_cast<Event*>(handle); }

}  // namespace

extern "C" {

// ---- the library and its devices

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char* aclGetRecentErrMsg() { return "npu_sim, no NPU"; }
const char* aclrtGetSocName() { return knobs().soc.c_str(); }

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
    const std::string& text = name == ACL_PKG_NAME_DRIVER ? knobs().driver : knobs().cann;
    if (text.empty()) return ACL_ERROR_INVALID_FILE;
    std::memset(version, 0, sizeof *version);
    std::snprintf(version->version, sizeof version->version, "%s", text.c_str());
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = knobs().n_devices;
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || static_cast<uint32_t>(device) >= knobs().n_devices) return ACL_ERROR_RT_INVALID_DEVICEID;
    current_device = device;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetDevice(int32_t* device) {
    if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current_device;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext* current) {
    if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *current = &context;
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext) {
    if (current_device < 0) current_device = 0;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
    *value = kCores;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
    *can = 0;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    *pid = 1;
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    *free = *total = kDeviceNbytes;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
    *value = 0;
    return ACL_SUCCESS;
}

// ---- memory

aclError aclrtMalloc(void** address, size_t n_bytes, aclrtMemMallocPolicy) {
    return memory().allocate(address, n_bytes, Place::kDevice);
}
aclError aclrtMallocAlign32(void** address, size_t n_bytes, aclrtMemMallocPolicy) {
    return memory().allocate(address, n_bytes, Place::kDevice);
}
aclError aclrtFree(void* address) { return memory().release(address, Place::kDevice); }
aclError aclrtMallocHost(void** address, size_t n_bytes) { return memory().allocate(address, n_bytes, Place::kHost); }
aclError aclrtMallocHostWithCfg(void** address, uint64_t n_bytes, aclrtMallocConfig*) {
    return memory().allocate(address, n_bytes, Place::kHost);
}
aclError aclrtFreeHost(void* address) { return memory().release(address, Place::kHost); }
aclError aclrtHostRegisterV2(void* address, uint64_t n_bytes, uint32_t) { return memory().lock(address, n_bytes); }
aclError aclrtHostUnregister(void* address) { return memory().unlock(address); }

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
    std::memset(attributes, 0, sizeof *attributes);
    switch (memory().place(address)) {
        case Place::kHost: attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST; break;
        case Place::kDevice: attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE; break;
        case Place::kUnknown: attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED; break;
    }
    return ACL_SUCCESS;
}

// ---- streams

aclError aclrtCreateStream(aclrtStream* stream) {
    *stream = open_stream();
    return ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }

aclError aclrtDestroyStream(aclrtStream stream) {
    close_stream(stream_of(stream));
    return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtSynchronizeStream(aclrtStream stream) {
    ++counters().synchronizations;
    return stream_of(stream)->synchronize();
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }

aclError aclrtSynchronizeDevice() {
    ++counters().synchronizations;
    return synchronize_all();
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
    *status = stream_of(stream)->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    *id = stream_of(stream)->id();
    return ACL_SUCCESS;
}

// ---- events

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
    *event = new Event;
    return ACL_SUCCESS;
}
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
    delete &event_of(event);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    stream_of(stream)->record(event_of(event));
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    stream_of(stream)->wait(event_of(event));
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    bool complete = false;
    const aclError error = query(event_of(event), &complete);
    *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return error;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent event) { return synchronize(event_of(event)); }

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
    const std::lock_guard lock(world());
    *ms = static_cast<float>(event_of(end).state->done_ms - event_of(start).state->done_ms);
    return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* us) {
    const std::lock_guard lock(world());
    *us = static_cast<uint64_t>(event_of(event).state->done_ms * 1000);
    return ACL_SUCCESS;
}

}  // extern "C"
