#include "pipeline/work_queue.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace hetero {

void WorkQueue::push(Work work) {
  const std::int64_t key = work.task.key;
  work.place = {work.task.priority, pushed_++};
  if (work.task.needs_buffer()) places_[key].push_back(work.place);
  forget_expected(key);
  // From the end, because most tasks come in order.
  auto at = works_.end();
  const auto first = works_.begin() + (front_is_held_ ? 1 : 0);
  while (at != first && work.place < std::prev(at)->place && std::prev(at)->task.key != key) --at;
  works_.insert(at, std::move(work));
  HETERO_CHECK(is_consistent());
}

Work WorkQueue::pop() {
  Work work = std::move(works_.front());
  works_.pop_front();
  front_is_held_ = false;
  if (work.task.needs_buffer()) {
    const auto found = places_.find(work.task.key);
    found->second.pop_front();
    if (found->second.empty()) places_.erase(found);
  }
  HETERO_CHECK(is_consistent());
  return work;
}

bool WorkQueue::take_back(std::int64_t first, std::size_t count) {
  const auto last = first + static_cast<std::int64_t>(count);
  const auto is_meant = [&](const Work& work) {
    return first <= work.task.key && work.task.key < last;
  };
  if (front_is_held_ && is_meant(works_.front())) return false;
  std::vector<bool> found(count);
  for (const Work& work : works_) {
    if (!is_meant(work)) continue;
    const auto i = static_cast<std::size_t>(work.task.key - first);
    if (found[i]) return false;  // two tasks of one key
    found[i] = true;
  }
  if (!std::ranges::all_of(found, std::identity{})) return false;
  std::erase_if(works_, is_meant);
  for (std::int64_t key = first; key < last; ++key) places_.erase(key);
  HETERO_CHECK(is_consistent());
  return true;
}

void WorkQueue::clear() {
  works_.clear();
  front_is_held_ = false;
  places_.clear();
  expect({});
}

void WorkQueue::expect(std::vector<Expectation> expected) {
  set_expected(std::move(expected));
  repeats_ = false;
  kept_.clear();
}

void WorkQueue::expect_again(std::vector<Expectation> expected, std::size_t keep) {
  if (!expected.empty()) {
    std::vector<std::size_t> order(expected.size());
    std::iota(order.begin(), order.end(), 0);
    keep = std::min(keep, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(keep), order.end(),
                      [&](std::size_t a, std::size_t b) {
                        return std::pair(expected[a].priority, b) <
                               std::pair(expected[b].priority, a);
                      });
    kept_.clear();
    for (std::size_t i = 0; i < keep; ++i) kept_.insert(expected[order[i]].key);
  }
  set_expected(std::move(expected));
  repeats_ = true;
}

void WorkQueue::set_expected(std::vector<Expectation> expected) {
  expected_ = std::move(expected);
  expected_from_ = 0;
  expected_at_.clear();
  for (std::size_t i = 0; i < expected_.size(); ++i) expected_at_.emplace(expected_[i].key, i);
}

void WorkQueue::forget_expected(std::int64_t key) {
  if (key < 0) return set_expected({});
  expected_at_.erase(key);
  while (expected_from_ < expected_.size() && !is_expected(expected_from_)) ++expected_from_;
}

QueuePlace WorkQueue::first_place(std::int64_t key) const {
  const auto found = places_.find(key);
  if (found != places_.end()) return found->second.front();
  const auto expected = expected_at_.find(key);
  return expected == expected_at_.end() ? kNowhere : QueuePlace{kExpected, expected->second};
}

bool WorkQueue::is_consistent() const {
  std::unordered_map<std::int64_t, std::deque<QueuePlace>> places;
  for (const Work& work : works_) {
    if (work.task.needs_buffer()) places[work.task.key].push_back(work.place);
  }
  return places == places_ && (!front_is_held_ || !works_.empty());
}

}  // namespace hetero
