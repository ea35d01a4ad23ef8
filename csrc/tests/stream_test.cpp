#include "runtime/stream.h"

#include "tests/check.h"

namespace timelyfreeze::testing {
namespace {

// Three queues, as on a device: the producer's, the copy's, the consumer's. The data is plain memory, so a hand-over
// that leaves out one wait is a data race that ThreadSanitizer reports, and a wrong value where it does not run.
TEST(shipped_data_is_there_when_the_consumer_reads) {
  const QueueStream producer;
  const QueueStream copy;
  const QueueStream consumer;
  int64_t produced = 0;
  int64_t copied = 0;
  int64_t consumed = 0;
  for (int64_t round = 1; round <= 500; ++round) {
    producer.enqueue([&, round] { produced = round; });
    const auto arrived = ship<QueueEvent>(
        producer, copy, [] { return QueueEvent(); }, [&] { copy.enqueue([&] { copied = produced; }); });
    arrived->block(consumer);
    consumer.enqueue([&] { consumed += copied; });
    QueueEvent done;
    done.record(consumer);
    done.block(producer);  // the next round writes what this one has read
    if (round % 100 == 0) {
      done.synchronize();
      CHECK(consumed == round * (round + 1) / 2);
    }
  }
}

}  // namespace
}  // namespace timelyfreeze::testing
