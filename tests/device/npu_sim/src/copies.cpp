// The copies of AscendCL's runtime, synchronous, asynchronous and batched.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "acl/acl_rt.h"
#include "acl/error_codes/rt_error_codes.h"
#include "knobs.h"
#include "memory.h"
#include "stream.h"

using namespace npu_sim;

namespace {

// ACL_ERROR_RT_PARAM_INVALID if one side is not the device memory that the kind says it is.
aclError describe(void* target, const void* source, size_t n_bytes, aclrtMemcpyKind kind, CopyItem* item) {
    const bool target_on_device = memory().place(target, n_bytes) == Place::kDevice;
    const bool source_on_device = memory().place(source, n_bytes) == Place::kDevice;
    if (kind == ACL_MEMCPY_DEFAULT)
        kind = target_on_device ? (source_on_device ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_HOST_TO_DEVICE)
                                : (source_on_device ? ACL_MEMCPY_DEVICE_TO_HOST : ACL_MEMCPY_HOST_TO_HOST);
    const bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    const bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
    if ((!to_device && !from_device) || to_device != target_on_device || from_device != source_on_device)
        return ACL_ERROR_RT_PARAM_INVALID;
    const bool locked = (to_device && from_device) ||
                        memory().place(to_device ? source : target, n_bytes) == Place::kHost;
    *item = {target, source, n_bytes, kind, locked};
    return ACL_SUCCESS;
}

bool is_refused() {
    if (!strikes(knobs().fail_submit)) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(knobs().refusal_us));
    return true;
}

// "If the memory is not page-locked, synchronous copying will be performed", say the headers; and so do we.
aclError submit(std::vector<CopyItem> items, Stream* stream) {
    if (is_refused()) return ACL_ERROR_RT_INTERNAL_ERROR;
    bool locked = true;
    for (const CopyItem& item : items) locked = locked && item.locked;
    stream->copy({std::move(items), strikes(knobs().fail_run)});
    if (locked) return ACL_SUCCESS;
    ++counters().pageable_copies;
    return stream->synchronize();
}

aclrtMemcpyKind kind_of(const aclrtMemcpyBatchAttr& attributes) {
    const bool to_device = attributes.dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    const bool from_device = attributes.srcLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    if (to_device == from_device) return ACL_MEMCPY_HOST_TO_HOST;  // which no batch may be
    return to_device ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
}

// Reads all arrays before it returns. CANN does not say when it reads them.
aclError read_batch(void** targets, const size_t* target_max, void** sources, const size_t* sizes, size_t n_items,
                    const aclrtMemcpyBatchAttr* attributes, const size_t* attribute_starts, size_t n_attributes,
                    size_t* failed, std::vector<CopyItem>* items) {
    *failed = SIZE_MAX;
    if (!n_attributes) return ACL_ERROR_RT_PARAM_INVALID;
    items->resize(n_items);
    size_t at = 0;
    for (size_t i = 0; i < n_items; ++i) {
        while (at + 1 < n_attributes && attribute_starts[at + 1] <= i) ++at;
        aclError error = ACL_ERROR_RT_PARAM_INVALID;
        if (sizes[i] <= target_max[i])
            error = describe(targets[i], sources[i], sizes[i], kind_of(attributes[at]), &(*items)[i]);
        if (error != ACL_SUCCESS) {
            *failed = i;
            return error;
        }
    }
    ++counters().batches;
    counters().batch_items += static_cast<long>(n_items);
    return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclError aclrtMemcpy(void* target, size_t target_max, const void* source, size_t n_bytes, aclrtMemcpyKind kind) {
    CopyItem item{};
    if (n_bytes > target_max) return ACL_ERROR_RT_PARAM_INVALID;
    const bool on_host = memory().place(target) != Place::kDevice && memory().place(source) != Place::kDevice;
    if (!on_host) {
        const aclError error = describe(target, source, n_bytes, kind, &item);
        if (error != ACL_SUCCESS) return error;
    }
    if (is_refused()) return ACL_ERROR_RT_INTERNAL_ERROR;
    if (strikes(knobs().fail_run)) return ACL_ERROR_RT_SYS_DMA;
    ++counters().sync_copies;
    std::memcpy(target, source, n_bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* target, size_t target_max, const void* source, size_t n_bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    CopyItem item{};
    if (n_bytes > target_max) return ACL_ERROR_RT_PARAM_INVALID;
    const aclError error = describe(target, source, n_bytes, kind, &item);
    if (error != ACL_SUCCESS) return error;
    ++counters().async_copies;
    return submit({item}, static_cast<Stream*>(stream));
}

aclError aclrtMemcpyAsyncWithCondition(void* target, size_t target_max, const void* source, size_t n_bytes,
                                       aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpyAsync(target, target_max, source, n_bytes, kind, stream);
}

aclError aclrtMemcpyBatchAsync(void** targets, size_t* target_max, void** sources, size_t* sizes, size_t n_items,
                               aclrtMemcpyBatchAttr* attributes, size_t* attribute_starts, size_t n_attributes,
                               size_t* failed, aclrtStream stream) {
    std::vector<CopyItem> items;
    const aclError error = read_batch(targets, target_max, sources, sizes, n_items, attributes, attribute_starts,
                                      n_attributes, failed, &items);
    if (error != ACL_SUCCESS) return error;
    return submit(std::move(items), static_cast<Stream*>(stream));
}

aclError aclrtMemcpyBatch(void** targets, size_t* target_max, void** sources, size_t* sizes, size_t n_items,
                          aclrtMemcpyBatchAttr* attributes, size_t* attribute_starts, size_t n_attributes,
                          size_t* failed) {
    std::vector<CopyItem> items;
    const aclError error = read_batch(targets, target_max, sources, sizes, n_items, attributes, attribute_starts,
                                      n_attributes, failed, &items);
    if (error != ACL_SUCCESS) return error;
    if (is_refused()) return ACL_ERROR_RT_INTERNAL_ERROR;
    for (const CopyItem& item : items) std::memcpy(item.target, item.source, item.n_bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemset(void* target, size_t target_max, int32_t value, size_t n_bytes) {
    if (n_bytes > target_max) return ACL_ERROR_RT_PARAM_INVALID;
    std::memset(target, value, n_bytes);
    return ACL_SUCCESS;
}

}  // extern "C"
