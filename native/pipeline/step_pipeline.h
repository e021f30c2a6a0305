// The optimizer step over pieces: read -> update -> write, several pieces in flight.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/io_engine.h"
#include "pipeline/step_task.h"
#include "update/update.h"

namespace hetero {

struct StepStats {
  std::uint64_t tasks = 0;  // updated
  std::uint64_t hits = 0;   // tasks that found their file parts in a buffer that kept them
  std::uint64_t ahead = 0;  // tasks that found them read ahead
  std::uint64_t read_bytes = 0, written_bytes = 0;
  double adam_s = 0;        // computing
  double read_wait_s = 0;   // waiting for a task's reads
  double write_wait_s = 0;  // waiting for a buffer, that is for an earlier task's write
};

// Works on two threads: one gives buffers to the tasks in order and submits their reads, as far
// ahead as there are buffers; the other computes and submits the writes.
//
// A buffer keeps its content, so that a later task with the same key need not read it. A parameter
// is written at once, because the next forward reads it from the file; a record only when its
// buffer is needed for another one (step_buffers.h), or by flush(). Until then the file is behind,
// so a key's record must not move before forget().
//
// What later tasks are expected to find in the file is read ahead of them when no task waits for a
// buffer. Nobody has to wait for that, or to end it: what buffers keep is what the file has,
// whether its task comes or not. All transfers take their turns after those of others
// (IoTurn::idle): a backward that reads parameters meanwhile does not wait for more than is in
// flight.
//
// The first failure, of a transfer or anything else, stops the pipeline: queued tasks are dropped
// and every later call but close() and stats() rethrows it.
//
// After fork() the child's copy refuses all work and is left alone by close() and the destructor.
class StepPipeline {
 public:
  // `memory` (page-aligned) holds `buffers` buffers one after another; `keeper` keeps it alive and
  // is let go by close(). Without an engine only tasks that live in RAM are allowed. Throws
  // std::invalid_argument for what does not fit together.
  StepPipeline(std::shared_ptr<IoEngine> engine, int file, char* memory, std::size_t memory_bytes,
               std::size_t buffers, const PieceLayout& layout, std::shared_ptr<const void> keeper);
  ~StepPipeline();
  StepPipeline(const StepPipeline&) = delete;
  StepPipeline& operator=(const StepPipeline&) = delete;

  // Queues the tasks, each in its turn (step_task.h) among those that have no buffer yet; their RAM
  // parts must stay until updated. All or nothing: throws std::invalid_argument if any is not
  // valid.
  void submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers);

  // From now on reads ahead what `expected`, in this order, find in the file and no buffer has;
  // replaces what was expected before. With `streaming` 0 it takes buffers whose content nobody
  // wants. Else the order is the same in every step, and all buffers but `streaming` keep what is
  // due first (step_buffers.h). Throws std::invalid_argument if any is not valid.
  void expect(std::vector<Expectation> expected, std::size_t streaming);

  // Until every submitted update, or those of `key`, are computed: parameters in RAM are final,
  // gradients free.
  void wait_updated(std::int64_t key = -1);

  // Whether wait_updated(key) would return, or throw, at once.
  bool is_updated(std::int64_t key = -1) const;
  // Likewise of wait_written(key).
  bool is_written(std::int64_t key = -1) const;

  // Until no write, or none of `key` (-1: any), is under way: parameters in the file are final.
  void wait_written(std::int64_t key = -1);

  // Writes the records that only buffers have, then wait_written: the file has all.
  void flush(std::int64_t key = -1);

  // flush, then drops the kept content, and expects nothing any more: somebody else is about to use
  // the file or the buffers.
  void forget(std::int64_t key = -1);

  StepStats stats() const;

  // For tests: the nth update from now (from 0) throws std::runtime_error and changes nothing.
  void inject(std::uint64_t nth);

  // For tests: the nth update from now (from 0) waits until release(), or until the pipeline stops;
  // the task's reads are done then. One update is held at a time.
  void hold(std::uint64_t nth);
  void release();

  // Abandons the tasks not yet being computed, waits for transfers in flight, joins the threads.
  // Idempotent. If tasks were abandoned, later waits throw. Records that were not flushed are lost.
  void close();

 private:
  class Impl;

  Impl& impl() const;  // throws std::runtime_error in a forked child

  pid_t owner_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hetero
