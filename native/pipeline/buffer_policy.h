// Which buffer a task gets, what is read ahead of tasks, and when dirty content is written.
//
// A dirty optimizer state is written when its buffer is needed and not before: with B buffers, N
// tiles and an order that alternates (zig-zag), a step reads and writes N - B of them and not one
// more.
//
// What tasks are expected to bring is read ahead of them, in their order. If the order alternates,
// into buffers whose content no task wants. If it *repeats*, the same in every step, some buffers
// are for what streams through: what is updated there is written at once, and what is wanted later
// makes room for what is wanted sooner. All others *keep* what they have from step to step: what is
// used next first, or else the order's end, because a forward waits for that. So a step writes
// N - (B - streaming) optimizer states, if so many do not fit, and reads about as many: a few less
// if what streamed through last is still there, a few more if what was read ahead had to make room.
//
// Nothing here starts a transfer, waits or locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/buffer_pool.h"
#include "pipeline/work_queue.h"

namespace hetero {

class BufferPolicy {
 public:
  // Both must outlive the policy, which changes of them only what the queue expects.
  BufferPolicy(WorkQueue& queue, BufferPool& buffers);

  // Takes over a new order of tasks to come. `streaming` 0: the order alternates; else it repeats,
  // and so many buffers keep nothing.
  void expect(std::vector<Expectation> expected, std::size_t streaming);

  // How many tasks with buffers may be staged: half of the buffers that are not kept. With all of
  // them the disk, whose queue is first in first out, would read all, then write all, and never
  // both at once, which is faster.
  std::size_t most_staged() const { return most_staged_; }

  // What to do for a task that finds its content in no buffer: take `buffer`; if that is nullptr,
  // start to write `write_back` and ask again; if that is empty, ask again when something changed.
  struct Choice {
    Buffer* buffer = nullptr;
    std::vector<Buffer*> write_back;
  };
  // Chooses among the buffers whose content no task wants the one used least recently, even if it
  // is still being written, for the reason given at shortage(). To wait for a task's buffer is
  // better than to give up content that another task is about to want; only if all is wanted, what
  // is wanted last goes.
  Choice choose(QueuePlace place);

  // The next of what is expected that no buffer has, and a buffer for it, which may be dirty; none
  // if there is nothing to read, or no buffer for it.
  struct ReadAhead {
    const Expectation* expectation = nullptr;
    Buffer* buffer = nullptr;
  };
  ReadAhead choose_read_ahead();

  // Whether to read ahead before the first task of the queue gets its buffer. That is so at the end
  // of an order that repeats, for content that is used next before all that is queued: a forward
  // waits for it, while the disk has plenty of time for the rest. Some buffers stay for the queue.
  bool reads_ahead_first() const;

  // Whether an optimizer state is written as soon as it is updated, and does not stay dirty.
  bool writes_at_once(std::int64_t key) const;

 private:
  bool is_wanted(const Buffer& buffer) const;  // by a task, queued or expected, or kept

  // The least recently used buffer that is free at once and not wanted.
  Buffer* spare();
  // The dirty buffers that are no task's and not wanted, least recently used first.
  std::vector<Buffer*> dirty_and_unwanted();
  // Whether some task has a buffer whose content is not wanted after it.
  bool one_will_be_spare() const;
  // Of the buffers that are no task's the one wanted last, one that is kept only if all are;
  // nullptr if tasks have all.
  Buffer* wanted_last();
  // If the order repeats, of the buffers that are no task's and not kept the one wanted last, if it
  // is wanted after `place`. (What was read ahead makes room for reading ahead alone.)
  Buffer* wanted_after(QueuePlace place);
  const Expectation* first_missing() const;

  // By how many buffers the tasks that find no content, queued or expected, need more than are
  // spare; at most `limit`. What is kept dirty or is written follows from this figure, which
  // neither staging nor reading ahead changes: so it depends on the order of the tasks alone, not
  // on the disk's timing.
  std::size_t shortage(std::size_t limit) const;

  WorkQueue& queue_;
  BufferPool& buffers_;
  std::size_t most_staged_;
  std::size_t streaming_ = 0;  // buffers that keep nothing, if the order repeats
};

}  // namespace hetero
