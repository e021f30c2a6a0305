// The step pipeline's buffers and the tasks that wait for one; which buffer is given up, and when.
//
// A buffer keeps what it held after its task. A kept record is *clean* (the file has the same) or
// *dirty* (the file is behind). A dirty record is written when its buffer is needed and not before:
// with B buffers, N records and an order that alternates (zig-zag), a step reads and writes N - B
// records and not one more.
//
// What tasks are *expected* to bring is read ahead of them, in their order. If the order
// alternates, into buffers whose content nobody wants. If it *repeats*, the same in every step,
// some buffers are for what streams through: what is updated there is written at once, and what is
// wanted later makes room for what is wanted sooner. All others *keep* what they have from step to
// step, which is what is due first, or else the order's end: that is what somebody waits for. So a
// step writes N - (B - streaming) records, if so many do not fit, and reads about as many: a few
// less if what streamed through last is still there, a few more if what was read ahead had to make
// room.
//
// Nothing here locks: all of it is used under the pipeline's lock.
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

#include "io/io_engine.h"
#include "pipeline/step_task.h"
#include "update/update.h"

namespace hetero {

enum class BufferState {
  idle,      // nobody's; may keep the content of `key`
  reading,   // the engine fills it ahead of a task, until its reads are done; then idle
  assigned,  // a task's that is not updated yet: its reads fill it, its update changes it
  writing,   // the engine reads it, until its writes are done; then idle
};

// `reads` belongs to the task that has the buffer, if one has; all else to the pipeline's lock.
struct Buffer {
  static constexpr std::int64_t kNoKey = -1;
  static constexpr std::int64_t kClean = -1;

  // Whether it is idle, which it becomes here if its transfers are done. Throws if a write failed;
  // what could not be read ahead is not kept, so its task reads it again.
  bool settle();
  void drop();  // its content
  bool dirty() const { return dirty_at != kClean; }
  // Takes no task's memory away and needs no write first.
  bool free_at_once() const { return state != BufferState::assigned && !dirty(); }

  char* memory = nullptr;
  BufferState state = BufferState::idle;
  std::int64_t key = kNoKey;  // whose content is here, or is on its way
  bool keeps_record = false;
  bool keeps_param = false;
  bool read_ahead = false;         // what it keeps was read for a task that did not come yet
  std::int64_t dirty_at = kClean;  // file offset where the dirty record belongs
  std::uint64_t last_used = 0;
  std::vector<std::shared_ptr<IoOp>> reads;
  std::vector<std::shared_ptr<IoOp>> writes;
};

// When a task is taken: before those whose turn is larger.
struct Turn {
  std::uint64_t due = 0;     // the task's
  std::uint64_t number = 0;  // among all tasks ever submitted

  auto operator<=>(const Turn&) const = default;
};

// A submitted task.
struct Work {
  StepTask task;
  std::shared_ptr<const std::vector<UpdateConstants>> constants;
  Turn turn = {};
  Buffer* buffer = nullptr;  // none if the task lives in RAM
};

// Tasks in order, and after them those that are expected; with an index of when each key is wanted
// next.
class WorkQueue {
 public:
  static constexpr Turn kNever = {std::numeric_limits<std::uint64_t>::max(), 0};
  // What is expected is due after all tasks.
  static constexpr std::uint64_t kExpected = kNever.due - 1;

  // In its turn, but after a task that is held in front and those of the same piece. The task is
  // not expected any more.
  void push(Work work);
  // The first task stays first until it is popped.
  void hold_front() { front_is_held_ = true; }
  Work pop();
  void clear();
  // Replaces what is expected, in an order that alternates; nothing is kept.
  void expect(std::vector<Expectation> expected);
  // Likewise in an order that repeats. So many are kept, those that are due first, and of those
  // that are due together the last; if nothing is expected, the same as before.
  void expect_again(std::vector<Expectation> expected, std::size_t keep);
  // Nobody reads ahead for the key any more, or (below 0) for any.
  void forget_expected(std::int64_t key);
  bool empty() const { return works_.empty(); }
  std::size_t size() const { return works_.size(); }
  Work& front() { return works_.front(); }
  const Work& front() const { return works_.front(); }
  auto begin() const { return works_.begin(); }
  auto end() const { return works_.end(); }
  // The turn of the first task that wants a buffer with this key's content, queued or expected.
  Turn next_use(std::int64_t key) const;
  std::size_t expected() const { return expected_at_.size(); }  // have not come
  bool is_queued(std::int64_t key) const { return turns_.contains(key); }
  bool repeats() const { return repeats_; }
  bool keeps(std::int64_t key) const { return kept_.contains(key); }
  // What is expected still, in order: calls visit(expectation) until it returns false.
  template <class Visit>
  void each_expected(Visit visit) const {
    for (std::size_t i = expected_from_; i < expected_.size(); ++i) {
      if (is_expected(i) && !visit(expected_[i])) return;
    }
  }

 private:
  void set_expected(std::vector<Expectation> expected);
  bool is_expected(std::size_t i) const {
    const auto found = expected_at_.find(expected_[i].key);
    return found != expected_at_.end() && found->second == i;
  }

  std::deque<Work> works_;
  bool front_is_held_ = false;
  std::unordered_map<std::int64_t, std::deque<Turn>> turns_;  // by key, of works_
  std::uint64_t pushed_ = 0;
  std::vector<Expectation> expected_;
  std::size_t expected_from_ = 0;                              // those before it have come
  std::unordered_map<std::int64_t, std::size_t> expected_at_;  // by key: of those that have not
  bool repeats_ = false;
  std::unordered_set<std::int64_t> kept_;  // keys whose content stays, if the order repeats
};

class BufferPool {
 public:
  BufferPool(char* memory, std::size_t count, std::size_t buffer_bytes);

  std::size_t size() const { return buffers_.size(); }
  auto begin() { return buffers_.begin(); }
  auto end() { return buffers_.end(); }

  // The buffer with the key's content, whatever its state; nullptr if there is none.
  Buffer* find(std::int64_t key) const;

  // Gives the buffer, whose content is no longer wanted, to the task's key.
  void rename(Buffer& buffer, std::int64_t key);
  void forget(Buffer& buffer);
  void touch(Buffer& buffer) { buffer.last_used = ++clock_; }

  // The least recently used buffer that is free at once, not kept and that no task wants.
  Buffer* spare(const WorkQueue& queue);
  // The dirty ones among those that no task has or wants, and that are not kept, least recently
  // used first.
  std::vector<Buffer*> launderable(const WorkQueue& queue);
  // Whether some task has a buffer whose content no queued task wants.
  bool one_will_be_spare(const WorkQueue& queue) const;
  // Among the buffers that no task has, the one wanted last, which is kept only if all are; nullptr
  // if tasks have all.
  Buffer* wanted_last(const WorkQueue& queue);
  // Likewise of those that are wanted after `turn` and not kept, if the order repeats; or nullptr.
  // (What was read ahead makes room for nothing but what is to be read ahead.)
  Buffer* given_up(const WorkQueue& queue, Turn turn);
  // How many have what was read ahead for a task that did not come yet.
  std::size_t read_ahead() const;
  // The first of what is expected that no buffer has; nullptr if there is none.
  const Expectation* first_missing(const WorkQueue& queue) const;

  // By how many buffers the tasks that find no content, queued or expected, need more than are
  // spare; at most `limit`. What is kept dirty or is written follows from this figure, which
  // neither staging nor reading ahead changes: so it depends on the order of the tasks alone, not
  // on the disk's timing.
  std::size_t shortage(const WorkQueue& queue, std::size_t limit) const;

 private:
  bool wanted(const Buffer& buffer, const WorkQueue& queue) const;  // or kept

  std::vector<Buffer> buffers_;
  std::unordered_map<std::int64_t, Buffer*> by_key_;
  std::uint64_t clock_ = 0;  // orders the uses of buffers
};

}  // namespace hetero
