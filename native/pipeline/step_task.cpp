#include "pipeline/step_task.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hetero {
namespace {

[[noreturn]] void refuse(std::int64_t key, const std::string& fact) {
  throw std::invalid_argument("StepTask " + std::to_string(key) + ": " + fact);
}

void check_location(std::int64_t key, const Location& location, const char* name, bool has_room,
                    bool has_file) {
  if (key < 0) refuse(key, "the key must be at least 0");
  const bool offset_given = location.file_offset >= 0;
  if (location.in_file() != offset_given) {
    refuse(key, std::string(name) + (offset_given ? " has both an address and a file offset"
                                                  : " has neither an address nor a file offset"));
  }
  if (!location.in_file()) return;
  if (!has_file) {
    refuse(key, std::string(name) + " is in the file, but the pipeline has no engine");
  }
  if (!has_room) {
    refuse(key, std::string(name) + " is in the file, but the buffers have no room for it");
  }
  if (location.file_offset % static_cast<std::int64_t>(kPageBytes) != 0) {
    refuse(key, std::string(name) + "'s file offset " + std::to_string(location.file_offset) +
                    " is not a multiple of " + std::to_string(kPageBytes));
  }
}

void check_offset(std::int64_t key, std::int64_t offset, const char* name) {
  if (offset < 0 || offset % static_cast<std::int64_t>(kPageBytes) != 0) {
    refuse(key, std::string(name) + " is " + std::to_string(offset) + ", must be a multiple of " +
                    std::to_string(kPageBytes) + " and at least 0");
  }
}

}  // namespace

void StepTask::check(const TileLayout& layout, std::size_t hypers, bool has_file) const {
  check_location(key, param, "param", layout.param_in_file, has_file);
  check_location(key, grad, "grad", layout.grad_in_file, has_file);
  check_location(key, optim_state, "optim_state", true, has_file);
  if (saved_param != kNone) {
    check_offset(key, saved_param, "saved_param");
    if (param.in_file()) refuse(key, "saved_param is for a param in RAM");
    if (optim_state_to == kNone) {
      refuse(key, "an update can be taken back only if it leaves its optim_state in the file");
    }
  }
  if (optim_state_to != kNone) {
    check_offset(key, optim_state_to, "optim_state_to");
    if (!optim_state.in_file()) refuse(key, "optim_state_to is for an optim_state in the file");
  }
  if (param_to != kNone) {
    check_offset(key, param_to, "param_to");
    if (!param.in_file()) refuse(key, "param_to is for a param in the file");
  }
  std::vector<StepSegment> sorted = segments;
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::size_t end = 0;  // of the segments before
  for (const auto& [first, numel, hyper, index] : sorted) {
    const std::string segment =
        "segment (" + std::to_string(first) + ", " + std::to_string(numel) + ") ";
    if (numel > layout.tile_numel || first > layout.tile_numel - numel) {
      refuse(key,
             segment + "is outside the tile of " + std::to_string(layout.tile_numel) + " elements");
    }
    if (layout.kind.state_dtype == StateDtype::eight_bit && first % kStateBlockNumel != 0) {
      refuse(key, segment + "begins inside a state block of " + std::to_string(kStateBlockNumel) +
                      " elements");
    }
    if (first < end) {
      refuse(key, segment + "overlaps another that ends at " + std::to_string(end));
    }
    if (hyper >= hypers) {
      refuse(key, segment + "wants hyper-parameters " + std::to_string(hyper) + " of " +
                      std::to_string(hypers));
    }
    end = first + numel;
  }
}

void Expectation::check(const TileLayout& layout, bool has_file) const {
  check_location(key, param, "param", layout.param_in_file, has_file);
  check_location(key, optim_state, "optim_state", true, has_file);
}

}  // namespace hetero
