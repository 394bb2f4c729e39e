#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "acl/error_codes/rt_error_codes.h"
#include "knobs.h"
#include "memory.h"

namespace npu_sim {
namespace {

using Lock = std::unique_lock<std::mutex>;

constexpr uint64_t kSeedStep = 1000003;

std::vector<Stream*>& streams() {
    static auto* const all = new std::vector<Stream*>;
    return *all;
}

std::condition_variable& progress() {
    static auto* const changed = new std::condition_variable;
    return *changed;
}

// The places must still be what they were at the submission: memory freed or unlocked under a copy is a fault here,
// and something worse on a device.
bool still_valid(const CopyItem& item) {
    const bool to_device = item.kind == ACL_MEMCPY_HOST_TO_DEVICE;
    const void* device = to_device ? item.target : item.source;
    const void* host = to_device ? item.source : item.target;
    if (item.kind == ACL_MEMCPY_DEVICE_TO_DEVICE)
        return memory().place(item.target, item.n_bytes) == Place::kDevice &&
               memory().place(item.source, item.n_bytes) == Place::kDevice;
    return memory().place(device, item.n_bytes) == Place::kDevice &&
           (!item.locked || memory().place(host, item.n_bytes) == Place::kHost);
}

void move(const CopyItem& item, bool second_half) {
    const size_t half = item.n_bytes / 2;
    const size_t at = second_half ? half : 0;
    std::memcpy(static_cast<char*>(item.target) + at, static_cast<const char*>(item.source) + at,
                second_half ? item.n_bytes - half : half);
}

}  // namespace

std::mutex& world() {
    static auto* const mutex = new std::mutex;
    return *mutex;
}

double now_ms() {
    using std::chrono::duration, std::chrono::steady_clock;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

Stream::Stream(int id)
    : id_(id),
      random_(static_cast<uint64_t>(knobs().seed) * kSeedStep + static_cast<uint64_t>(id)),
      may_be_slow_(random_() % 3 == 0),
      thread_([this] { run(); }) {}

Stream::~Stream() {
    {
        Lock lock(world());
        rests_.wait(lock, [this] { return (queue_.empty() && !running_) || held_; });
        stopped_ = true;
        wake_.notify_all();
    }
    thread_.join();
}

void Stream::copy(Copy copy) {
    const std::lock_guard lock(world());
    push(std::move(copy));
}

void Stream::record(const Event& event) {
    const std::lock_guard lock(world());
    push(Record{event.state, ++event.state->issued});
}

void Stream::wait(const Event& event) {
    const std::lock_guard lock(world());
    push(Wait{event.state, event.state->issued});
}

void Stream::push(Task task) {
    queue_.push_back(std::move(task));
    wake_.notify_all();
}

aclError Stream::synchronize() {
    Lock lock(world());
    rests_.wait(lock, [this] { return queue_.empty() && !running_; });
    return std::exchange(error_, ACL_SUCCESS);
}

bool Stream::idle() {
    const std::lock_guard lock(world());
    return queue_.empty() && !running_;
}

void Stream::hold(bool on) {
    const std::lock_guard lock(world());
    held_ = on;
    wake_.notify_all();
    progress().notify_all();
}

void Stream::run() {
    Lock lock(world());
    for (;;) {
        wake_.wait(lock, [this] { return stopped_ || (!queue_.empty() && !held_); });
        if (stopped_) return;
        Task task = std::move(queue_.front());
        queue_.pop_front();
        running_ = true;
        pause(lock);
        std::visit([&](auto& it) { execute(it, lock); }, task);
        running_ = false;
        rests_.notify_all();
        progress().notify_all();
    }
}

void Stream::execute(Copy& copy, Lock& lock) {
    if (error_ != ACL_SUCCESS && knobs().faults_stay) return;
    if (copy.fails) return fault(ACL_ERROR_RT_SYS_DMA);
    // Nobody promises an order within a batch, nor that one of its copies ends before the next begins.
    std::shuffle(copy.items.begin(), copy.items.end(), random_);
    for (const bool second_half : {false, true}) {
        if (!std::all_of(copy.items.begin(), copy.items.end(), still_valid)) return fault(ACL_ERROR_RT_SYS_DMA);
        lock.unlock();
        for (const CopyItem& item : copy.items) move(item, second_half);
        lock.lock();
        if (!second_half) pause(lock);
    }
}

void Stream::execute(Record& record, Lock&) {
    EventState& event = *record.event;
    if (record.generation <= event.done) return;
    event.done = record.generation;
    event.done_ms = now_ms();
    event.error = knobs().faults_stay ? error_ : std::exchange(error_, ACL_SUCCESS);
    event.done_changed.notify_all();
}

void Stream::execute(Wait& wait, Lock& lock) {
    waiting_ = &wait;
    progress().notify_all();
    EventState& event = *wait.event;
    event.done_changed.wait(lock, [&] { return event.done >= wait.generation; });
    waiting_ = nullptr;
}

void Stream::fault(aclError error) {
    error_ = error;
    ++counters().faults;
}

void Stream::pause(Lock& lock) {
    const long longest_us = knobs().delay_us * (may_be_slow_ ? std::max(1L, knobs().slow.load()) : 1);
    if (longest_us <= 0) return;
    const std::chrono::microseconds pause(random_() % static_cast<uint64_t>(longest_us));
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
}

bool Stream::can_move() const {
    if (waiting_) return waiting_->event->done >= waiting_->generation;
    return running_ || (!queue_.empty() && !held_);
}

Stream* open_stream() {
    static int n_opened = 0;
    const std::lock_guard lock(world());
    streams().push_back(new Stream(n_opened++));
    return streams().back();
}

void close_stream(Stream* stream) {
    {
        const std::lock_guard lock(world());
        auto& all = streams();
        all.erase(std::remove(all.begin(), all.end(), stream), all.end());
    }
    delete stream;
}

aclError synchronize_all() {
    std::vector<Stream*> all;
    {
        const std::lock_guard lock(world());
        all = streams();
    }
    aclError first = ACL_SUCCESS;
    for (Stream* stream : all) {
        const aclError error = stream->synchronize();
        if (first == ACL_SUCCESS) first = error;
    }
    return first;
}

void settle() {
    Lock lock(world());
    progress().wait(lock, [] {
        return std::none_of(streams().begin(), streams().end(), [](const Stream* s) { return s->can_move(); });
    });
}

aclError query(const Event& event, bool* complete) {
    if (strikes(knobs().fail_query)) return ACL_ERROR_RT_INTERNAL_ERROR;
    const std::lock_guard lock(world());
    *complete = event.state->done >= event.state->issued;
    return *complete ? event.state->error : ACL_SUCCESS;
}

aclError synchronize(const Event& event) {
    Lock lock(world());
    EventState& state = *event.state;
    const uint64_t generation = state.issued;
    state.done_changed.wait(lock, [&] { return state.done >= generation; });
    return state.error;
}

}  // namespace npu_sim
