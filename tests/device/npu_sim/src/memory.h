// Which addresses are the device's, which are page-locked, and which are neither.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "acl/acl_rt.h"

namespace npu_sim {

enum class Place { kHost, kDevice, kUnknown };

// Device memory is host memory that we remember. New and freed memory is poisoned, so that no test passes because
// something was zero by luck or because nobody had used a freed page again yet.
class Memory {
public:
    aclError allocate(void** address, size_t n_bytes, Place place);
    aclError release(void* address, Place place);

    // Page-lock memory of the caller's. Fails as the knob register_limit says, and for ranges that overlap others.
    aclError lock(void* address, size_t n_bytes);
    aclError unlock(void* address);

    // Where all of these bytes lie; kUnknown for the caller's ordinary memory, freed memory and runs past an end.
    Place place(const void* address, size_t n_bytes = 1) const;

private:
    struct Range {
        size_t n_bytes;
        Place place;
        bool ours;  // allocated by us, not merely locked
    };
    using Ranges = std::map<uintptr_t, Range>;

    bool overlaps(uintptr_t start, size_t n_bytes) const;

    mutable std::mutex mutex_;
    Ranges ranges_;
};

Memory& memory();

}  // namespace npu_sim
