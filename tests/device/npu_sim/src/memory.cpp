#include "memory.h"

#include <cstdlib>
#include <cstring>

#include "acl/error_codes/rt_error_codes.h"
#include "knobs.h"

namespace npu_sim {
namespace {

constexpr size_t kPage = 4096;
constexpr int kNewDevice = 0xDB;
constexpr int kNewHost = 0xEB;
constexpr int kFreed = 0xFD;

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

aclError Memory::allocate(void** address, size_t n_bytes, Place place) {
    const size_t rounded = n_bytes ? (n_bytes + kPage - 1) / kPage * kPage : kPage;
    *address = std::aligned_alloc(kPage, rounded);
    if (!*address) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    std::memset(*address, place == Place::kDevice ? kNewDevice : kNewHost, rounded);
    const std::lock_guard lock(mutex_);
    ranges_[number(*address)] = {rounded, place, true};
    return ACL_SUCCESS;
}

aclError Memory::release(void* address, Place place) {
    size_t n_bytes = 0;
    {
        const std::lock_guard lock(mutex_);
        const auto found = ranges_.find(number(address));
        if (found == ranges_.end() || !found->second.ours || found->second.place != place)
            return ACL_ERROR_RT_PARAM_INVALID;
        n_bytes = found->second.n_bytes;
        ranges_.erase(found);
    }
    std::memset(address, kFreed, n_bytes);
    std::free(address);
    return ACL_SUCCESS;
}

aclError Memory::lock(void* address, size_t n_bytes) {
    if (!address || !n_bytes || number(address) % kPage) return ACL_ERROR_RT_PARAM_INVALID;
    const std::lock_guard lock(mutex_);
    if (overlaps(number(address), n_bytes)) return ACL_ERROR_RT_PARAM_INVALID;
    long left = knobs().register_limit;
    while (left > 0 && !knobs().register_limit.compare_exchange_weak(left, left - 1)) {
    }
    if (left == 0) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    ranges_[number(address)] = {n_bytes, Place::kHost, false};
    ++counters().registered;
    return ACL_SUCCESS;
}

aclError Memory::unlock(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(number(address));
    if (found == ranges_.end() || found->second.ours) return ACL_ERROR_RT_PARAM_INVALID;
    ranges_.erase(found);
    ++counters().unregistered;
    return ACL_SUCCESS;
}

Place Memory::place(const void* address, size_t n_bytes) const {
    const std::lock_guard lock(mutex_);
    auto after = ranges_.upper_bound(number(address));
    if (after == ranges_.begin()) return Place::kUnknown;
    const auto& [start, range] = *--after;
    return number(address) + n_bytes <= start + range.n_bytes ? range.place : Place::kUnknown;
}

bool Memory::overlaps(uintptr_t start, size_t n_bytes) const {
    const auto after = ranges_.lower_bound(start + n_bytes);
    if (after == ranges_.begin()) return false;
    const auto& [last, range] = *std::prev(after);
    return last + range.n_bytes > start;
}

Memory& memory() {
    static auto* const all = new Memory;
    return *all;
}

}  // namespace npu_sim
