// What a test may change: read from the environment when the library is loaded, changed later by npu_sim_set().
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace npu_sim {

struct Knobs {
    // Longest pause of a stream before a task, and again in the middle of it. NPU_SIM_DELAY_US.
    std::atomic<long> delay_us;
    // One stream in three pauses so many times longer. NPU_SIM_SLOW.
    std::atomic<long> slow;
    // Seed of all pauses and orders. NPU_SIM_SEED.
    std::atomic<long> seed;
    // How many more registrations of host memory succeed; negative: all. NPU_SIM_REGISTER_LIMIT.
    std::atomic<long> register_limit;
    // The nth copy from now on is refused when it is submitted; 0: none. NPU_SIM_FAIL_SUBMIT.
    std::atomic<long> fail_submit;
    // How long such a refusal takes, in which whoever submitted it by a queue goes on. NPU_SIM_REFUSAL_US.
    std::atomic<long> refusal_us;
    // The nth copy from now on fails while it runs; 0: none. NPU_SIM_FAIL_RUN.
    std::atomic<long> fail_run;
    // The nth query of an event from now on fails; 0: none. NPU_SIM_FAIL_QUERY.
    std::atomic<long> fail_query;

    // After a failure a stream copies nothing more, and each event tells of it, until the host has synchronized with the
    // stream; else the first to look is told and the stream goes on. CANN has both, by aclrtSetStreamFailureMode.
    // NPU_SIM_FAULTS_STAY.
    std::atomic<long> faults_stay;

    // Of the simulated machine, fixed for the process because torch_npu asks once.
    std::string cann;    // NPU_SIM_CANN, such as 8.5.0; empty: the version cannot be told
    std::string driver;  // NPU_SIM_DRIVER, such as 25.5.0
    std::string soc;     // NPU_SIM_SOC; decides whether torch_npu batches copies
    uint32_t n_devices;  // NPU_SIM_DEVICES

    // False if there is no such knob.
    bool set(const char* name, long value);
};

Knobs& knobs();

// Counts `remaining` down to its end; true for the one call that reaches it. 0 stays 0 and is never reached.
bool strikes(std::atomic<long>& remaining);

// How often something happened, for tests that ask which road a copy took.
struct Counters {
    std::atomic<long> batches{0};
    std::atomic<long> batch_items{0};
    std::atomic<long> async_copies{0};
    std::atomic<long> sync_copies{0};
    std::atomic<long> pageable_copies{0};  // asynchronous ones that had to wait, for want of page-locked memory
    std::atomic<long> registered{0};
    std::atomic<long> unregistered{0};
    std::atomic<long> faults{0};
    std::atomic<long> synchronizations{0};  // of streams and devices, by the host

    // -1 if there is no such counter.
    long get(const char* name) const;
};

Counters& counters();

}  // namespace npu_sim
