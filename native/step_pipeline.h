// The optimizer step over pieces: read -> update -> write, several pieces in flight.
//
// A *piece* is a rank's part of a chunk: a parameter payload, a gradient payload and a record. Each
// of the three is either in RAM, where it is used in place, or in the file, from where it passes
// through a *buffer*. piece_layout.h says how both are laid out.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io_engine.h"
#include "piece_layout.h"
#include "update.h"

namespace hetero {

// Where a payload lives: in RAM, or at an offset of the pipeline's file.
struct Location {
  char* address = nullptr;
  std::int64_t file_offset = -1;

  bool in_file() const { return address == nullptr; }
};

// Elements [first, first + numel) of a piece are updated with the task's hyper-parameters `hyper`.
struct StepSegment {
  std::size_t first = 0;
  std::size_t numel = 0;
  std::size_t hyper = 0;
  std::uint64_t index = 0;  // number of element `first`, for the random bits of bf16 states
};

// The update of one piece. `key` names the piece (at least 0).
struct StepTask {
  std::int64_t key = 0;
  Location param, grad, record;
  std::vector<StepSegment> segments;
};

struct StepStats {
  std::uint64_t tasks = 0;  // updated
  std::uint64_t hits = 0;   // tasks that found their file parts in a kept buffer
  std::uint64_t read_bytes = 0, written_bytes = 0;
  double adam_s = 0;        // computing
  double read_wait_s = 0;   // waiting for a task's reads
  double write_wait_s = 0;  // waiting for a buffer, that is for an earlier task's write
};

// Works on two threads: one gives buffers to the tasks in order and submits their reads, as far
// ahead as there are buffers; the other computes and submits the writes. A buffer keeps its clean
// content after its write, so that a later task with the same key need not read it.
//
// The first failure, of a transfer or anything else, stops the pipeline: queued tasks are dropped
// and every later call but close() and stats() rethrows it.
//
// After fork() the child's copy refuses all work and is left alone by close() and the destructor.
class StepPipeline {
 public:
  // `memory` (page-aligned) holds `buffers` buffers one after another and must outlive the
  // pipeline. Without an engine only tasks that live in RAM are allowed. Throws
  // std::invalid_argument for what does not fit together.
  StepPipeline(std::shared_ptr<IoEngine> engine, int file, char* memory, std::size_t memory_bytes,
               std::size_t buffers, const PieceLayout& layout);
  ~StepPipeline();
  StepPipeline(const StepPipeline&) = delete;
  StepPipeline& operator=(const StepPipeline&) = delete;

  // Queues the tasks in order; their RAM parts must stay until updated. All or nothing: throws
  // std::invalid_argument if any is not valid.
  void submit(std::vector<StepTask> tasks, std::span<const Hyper> hypers);

  // Until every submitted update is computed: parameters in RAM are final, gradients free.
  void wait_updated();

  // Until all writes, or those of `key` (-1: all), are in the file.
  void wait_written(std::int64_t key = -1);

  // wait_written, then drops the kept content: somebody else is about to write the file.
  void forget(std::int64_t key = -1);

  StepStats stats() const;

  // Abandons the tasks not yet being computed, waits for transfers in flight, joins the threads.
  // Idempotent. If tasks were abandoned, later waits throw.
  void close();

 private:
  class Impl;

  Impl& impl() const;  // throws std::runtime_error in a forked child

  pid_t owner_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hetero
