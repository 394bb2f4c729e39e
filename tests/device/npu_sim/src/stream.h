// Streams that really run late and out of step, and the events between them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "acl/acl_rt.h"

namespace npu_sim {

// One lock for all queues and events: what is asked about several of them (settle) is then one state of all.
std::mutex& world();

// What records, waits and the host share of an event. Each record is a generation; a wait or a query means the
// generation that was the newest when it was asked for.
struct EventState {
    std::condition_variable done_changed;
    uint64_t issued = 0;
    uint64_t done = 0;
    double done_ms = 0;            // when generation `done` was reached
    aclError error = ACL_SUCCESS;  // of the stream that reached it
};

// An event as torch_npu holds it. Tasks keep the state alive, so an event may be destroyed under them.
struct Event {
    std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

struct CopyItem {
    void* target;
    const void* source;
    size_t n_bytes;
    aclrtMemcpyKind kind;
    bool locked;  // its host memory was page-locked when the copy was submitted
};

struct Copy {
    std::vector<CopyItem> items;
    bool fails;
};
struct Record {
    std::shared_ptr<EventState> event;
    uint64_t generation;
};
struct Wait {
    std::shared_ptr<EventState> event;
    uint64_t generation;
};
using Task = std::variant<Copy, Record, Wait>;

// A queue with a thread of its own. It pauses before each task and within each copy, for times drawn from the seed.
class Stream {
public:
    explicit Stream(int id);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    int id() const { return id_; }
    void copy(Copy copy);
    void record(const Event& event);
    void wait(const Event& event);

    // Blocks the host until all that was queued has run; tells, once, of a failure since the last time.
    aclError synchronize();
    bool idle();
    // A held stream finishes what it runs and begins nothing more.
    void hold(bool on);

private:
    friend void settle();

    void run();
    void execute(Copy& copy, std::unique_lock<std::mutex>& lock);
    void execute(Record& record, std::unique_lock<std::mutex>& lock);
    void execute(Wait& wait, std::unique_lock<std::mutex>& lock);
    void push(Task task);
    void fault(aclError error);
    void pause(std::unique_lock<std::mutex>& lock);
    bool can_move() const;

    const int id_;
    std::mt19937_64 random_;
    const bool may_be_slow_;
    std::deque<Task> queue_;
    const Wait* waiting_ = nullptr;  // for an event, in the task that runs
    bool running_ = false;
    bool held_ = false;
    bool stopped_ = false;
    aclError error_ = ACL_SUCCESS;
    std::condition_variable wake_;
    std::condition_variable rests_;
    std::thread thread_;
};

// The streams of this process, made and ended here and nowhere else.
Stream* open_stream();
void close_stream(Stream* stream);
aclError synchronize_all();

// Blocks until no stream can go on: each has nothing to do, is held, or waits for an event that nothing brings nearer.
void settle();

aclError query(const Event& event, bool* complete);
aclError synchronize(const Event& event);
double now_ms();

}  // namespace npu_sim
