// Operations that go on in the background, and end once.
#pragma once

#include <atomic>

#include "base/fork.h"

namespace hetero {

// What submitter and owner share of an operation.
class Completion {
 public:
  // `what` is done, for the message of an exception: "transfer".
  explicit Completion(const char* what) : fork_(what) {}

  bool done() const { return settled_.load(std::memory_order_acquire) != 0; }
  // Blocks until done(), however it ends. Throws std::runtime_error in a forked child, where nobody
  // will settle it.
  void wait_done() const {
    while (!done()) {
      fork_.require_own();
      settled_.wait(0, std::memory_order_acquire);
    }
  }

 protected:
  // Once. The result, and the bytes, are visible to whoever sees done(). The caller shares
  // ownership of the operation, which waiters may let go of before they are notified.
  void settle() {
    // Sequentially consistent: libstdc++ wakes nobody if it counts no waiters, and reads that count
    // next. A store that is only a release may become visible after that, and a thread that has
    // begun to wait in between would see 0 and sleep for ever.
    settled_.store(1, std::memory_order_seq_cst);
    settled_.notify_all();
  }

 private:
  const ForkGuard fork_;
  std::atomic<int> settled_{0};
};

// Cancels an operation of `owner`, and waits until it is done, however it ends. Nothing in a forked
// child.
template <typename Owner, typename Op>
void abandon(Owner& owner, Op& op) noexcept {
  if (owner.foreign()) return;
  try {
    owner.cancel(op);
    op.wait_done();
  } catch (...) {  // Nobody wants to know how it ended.
  }
}

}  // namespace hetero
