#include "knobs.h"

#include <cstdlib>
#include <map>

namespace npu_sim {
namespace {

long number(const char* variable, long otherwise) {
    const char* text = std::getenv(variable);
    return text && *text ? std::atol(text) : otherwise;
}

std::string text(const char* variable, const char* otherwise) {
    const char* value = std::getenv(variable);
    return value ? value : otherwise;
}

}  // namespace

Knobs& knobs() {
    // Never destroyed: the threads of streams outlive main().
    static auto* const all = [] {
        auto* k = new Knobs;
        k->delay_us = number("NPU_SIM_DELAY_US", 200);
        k->slow = number("NPU_SIM_SLOW", 1);
        k->seed = number("NPU_SIM_SEED", 1);
        k->register_limit = number("NPU_SIM_REGISTER_LIMIT", -1);
        k->fail_submit = number("NPU_SIM_FAIL_SUBMIT", 0);
        k->refusal_us = number("NPU_SIM_REFUSAL_US", 0);
        k->fail_run = number("NPU_SIM_FAIL_RUN", 0);
        k->fail_query = number("NPU_SIM_FAIL_QUERY", 0);
        k->faults_stay = number("NPU_SIM_FAULTS_STAY", 0);
        k->cann = text("NPU_SIM_CANN", "");
        k->driver = text("NPU_SIM_DRIVER", "");
        k->soc = text("NPU_SIM_SOC", "Ascend910B2");
        k->n_devices = static_cast<uint32_t>(number("NPU_SIM_DEVICES", 1));
        return k;
    }();
    return *all;
}

bool Knobs::set(const char* name, long value) {
    const std::map<std::string, std::atomic<long>*> by_name{
        {"delay_us", &delay_us},       {"slow", &slow},         {"seed", &seed},
        {"register_limit", &register_limit}, {"fail_submit", &fail_submit}, {"refusal_us", &refusal_us}, {"fail_run", &fail_run},
        {"fail_query", &fail_query},   {"faults_stay", &faults_stay},
    };
    const auto found = by_name.find(name);
    if (found == by_name.end()) return false;
    *found->second = value;
    return true;
}

bool strikes(std::atomic<long>& remaining) {
    long before = remaining;
    while (before > 0 && !remaining.compare_exchange_weak(before, before - 1)) {
    }
    return before == 1;
}

Counters& counters() {
    static auto* const all = new Counters;
    return *all;
}

long Counters::get(const char* name) const {
    const std::map<std::string, const std::atomic<long>*> by_name{
        {"batches", &batches},         {"batch_items", &batch_items},   {"async_copies", &async_copies},
        {"sync_copies", &sync_copies}, {"pageable_copies", &pageable_copies}, {"registered", &registered},
        {"unregistered", &unregistered}, {"faults", &faults},           {"synchronizations", &synchronizations},
    };
    const auto found = by_name.find(name);
    return found == by_name.end() ? -1 : found->second->load();
}

}  // namespace npu_sim
