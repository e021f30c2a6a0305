// Copies over an emulated link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "link/copier.h"
#include "link/link.h"

namespace hetero {

class LinkCopier : public Copier {
 public:
  explicit LinkCopier(std::shared_ptr<Link> link) : link_(std::move(link)) {}

  // What is on an emulated device has its values always, so there are no events.
  std::unique_ptr<Copy> start(std::byte* to, const std::byte* from, std::size_t nbytes,
                              std::uintptr_t) override {
    return std::make_unique<LinkCopy>(*link_, link_->copy(LinkDirection::d2h, to, from, nbytes));
  }

 private:
  class LinkCopy : public Copy {
   public:
    LinkCopy(Link& link, std::shared_ptr<LinkOp> op) : link_(link), op_(std::move(op)) {}

    void wait() override { op_->wait(); }
    // (In a forked child, where the link throws, no thread comes here.)
    // NOLINTNEXTLINE(bugprone-exception-escape)
    void cancel() noexcept override { link_.cancel(*op_); }

   private:
    Link& link_;
    const std::shared_ptr<LinkOp> op_;
  };

  const std::shared_ptr<Link> link_;
};

}  // namespace hetero
