// The tasks of a step pipeline that have no buffer yet, in order, and those that are expected.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "pipeline/step_task.h"
#include "update/kernels/kernels.h"

namespace hetero {

struct Buffer;

// Where a task stands in the queue: before all tasks with larger places.
struct QueuePlace {
  std::uint64_t priority = 0;  // the task's
  std::uint64_t number = 0;    // among all tasks ever submitted

  auto operator<=>(const QueuePlace&) const = default;
};

// A submitted task, and the kind of its update.
struct Work {
  StepTask task;
  UpdateKind kind;
  std::shared_ptr<const std::vector<UpdateConstants>> constants;
  QueuePlace place = {};
  Buffer* buffer = nullptr;  // none if all parts of the tile are in RAM
};

// Tasks in order, and after them what is expected; with an index of the first place that wants each
// key's content in a buffer. It does not lock: it is used under the pipeline's lock.
class WorkQueue {
 public:
  static constexpr QueuePlace kNowhere = {std::numeric_limits<std::uint64_t>::max(), 0};
  // What is expected stands behind all tasks.
  static constexpr std::uint64_t kExpected = kNowhere.priority - 1;

  // Puts the task in its place, but behind a front that is held and behind tasks of the same tile.
  // The task is not expected any more.
  void push(Work work);
  // Keeps the first task first until it is popped.
  void hold_front() { front_is_held_ = true; }
  bool front_is_held() const { return front_is_held_; }
  Work pop();
  // Takes the task of each key in [first, first + count) out if each has one here, and none is a
  // front that is held; else none. Returns whether it did.
  bool take_back(std::int64_t first, std::size_t count);
  void clear();
  bool empty() const { return works_.empty(); }
  Work& front() { return works_.front(); }
  const Work& front() const { return works_.front(); }
  auto begin() const { return works_.begin(); }
  auto end() const { return works_.end(); }
  bool is_queued(std::int64_t key) const { return places_.contains(key); }

  // Replaces what is expected, in an order that alternates between steps; no key is kept.
  void expect(std::vector<Expectation> expected);
  // Replaces what is expected, in an order that is the same in every step, of which `keep` keys are
  // kept: those whose next use comes first, and of those used together the last of the order. An
  // empty order changes no key that is kept.
  void expect_again(std::vector<Expectation> expected, std::size_t keep);
  // Expects nothing of the key any more, or (below 0) of any key.
  void forget_expected(std::int64_t key);
  std::size_t expected() const { return expected_at_.size(); }  // have not come
  bool repeats() const { return repeats_; }
  // Whether the key's content stays in its buffer from step to step.
  bool keeps(std::int64_t key) const { return kept_.contains(key); }
  // Calls visit(expectation) for what has not come, in order, until it returns false.
  template <class Visit>
  void each_expected(Visit visit) const {
    for (std::size_t i = expected_from_; i < expected_.size(); ++i) {
      if (is_expected(i) && !visit(expected_[i])) return;
    }
  }

  // The first place, queued or expected, that wants a buffer with this key's content.
  QueuePlace first_place(std::int64_t key) const;

 private:
  void set_expected(std::vector<Expectation> expected);
  bool is_expected(std::size_t i) const {
    const auto found = expected_at_.find(expected_[i].key);
    return found != expected_at_.end() && found->second == i;
  }
  bool is_consistent() const;  // places_ is the index of works_; for HETERO_CHECK

  std::deque<Work> works_;
  bool front_is_held_ = false;
  // By key, the places of its tasks that need a buffer, in order.
  std::unordered_map<std::int64_t, std::deque<QueuePlace>> places_;
  std::uint64_t pushed_ = 0;
  std::vector<Expectation> expected_;
  std::size_t expected_from_ = 0;                              // those before it have come
  std::unordered_map<std::int64_t, std::size_t> expected_at_;  // by key: of those that have not
  bool repeats_ = false;
  std::unordered_set<std::int64_t> kept_;
};

}  // namespace hetero
