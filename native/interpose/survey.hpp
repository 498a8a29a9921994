// What the process owns and what stands in the way of a checkpoint, without stopping anything.
#pragma once

#include "wire.h"

#include <vector>

namespace woodfrog::interpose {

struct SurveyResult {
    wire::Survey survey;
    std::vector<wire::Device> devices;
};

SurveyResult take_survey();
// owned_bytes and owned_count only.
void count_owned(uint64_t *bytes, uint64_t *count);
uint32_t device_count();

} // namespace woodfrog::interpose
