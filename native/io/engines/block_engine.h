// An I/O engine: files, operations and their end, over a queue that a driver's threads work off.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "io/engines/driver.h"
#include "io/io_engine.h"

namespace hetero {

class BlockEngine final : public IoEngine {
 public:
  using MakeDriver = std::unique_ptr<Driver>(SharedQueue& shared, const IoOptions& options);

  // Throws std::invalid_argument for an option out of range, and what `make` throws.
  BlockEngine(const IoOptions& options, MakeDriver* make);

  std::string kind() const override;
  std::vector<std::string> notes() const override;
  int add_file(const std::vector<FileMember>& members, const StripeMap& stripes) override;
  void remove_file(int file) override;
  bool register_memory(const Arena& arena) override;
  void unregister_memory(const Arena& arena) override;
  std::shared_ptr<IoOp> submit(IoKind kind, int file, void* address, std::size_t nbytes,
                               std::uint64_t offset, IoTurn turn = IoTurn::next) override;
  void cancel(IoOp& op) override;
  void abandon(IoOp& op) noexcept override;
  IoStats stats() const override;
  void inject(const Fault& fault) override;
  void close() override;

  // False in a forked child, where destroying the engine would touch what is not ours to touch. Its
  // memory is then leaked on purpose.
  bool disposable() const { return !fork_.foreign(); }

 private:
  enum class Phase { open, closing, closed };

  void require_open() const REQUIRES(shared_.mutex);

  const ForkGuard fork_{"I/O engine", "make a new engine here"};
  mutable SharedQueue shared_;
  Phase phase_ GUARDED_BY(shared_.mutex) = Phase::open;
  Condition closed_;
  std::map<int, std::shared_ptr<IoFile>> files_ GUARDED_BY(shared_.mutex);
  int next_file_ GUARDED_BY(shared_.mutex) = 0;
  const std::unique_ptr<Driver> driver_;  // last: its threads use the others
};

}  // namespace hetero
