// A transport that hands every call on to another one: what watches or disturbs one overrides what it is about.
#pragma once

#include "sluice/transport.h"

namespace sluice {

class ForwardedTransport : public Transport {
 public:
  explicit ForwardedTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return inner_->name(); }
  std::int64_t num_ranks() const override { return inner_->num_ranks(); }
  std::int64_t rank() const override { return inner_->rank(); }
  Status exchange_counts(std::span<const std::int64_t> send, std::span<std::int64_t> received) override {
    return inner_->exchange_counts(send, received);
  }
  Result<Ticket> scatter(const RowMove& move) override { return inner_->scatter(move); }
  Result<Ticket> gather(const RowMove& move) override { return inner_->gather(move); }
  Status wait(Ticket ticket) override { return inner_->wait(ticket); }
  void abandon(const Status& why) override { inner_->abandon(why); }

 protected:
  Transport& inner() { return *inner_; }

 private:
  std::shared_ptr<Transport> inner_;
};

}  // namespace sluice
