// Collectives among processes of which each pair has a connected stream socket.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "record_layer.hpp"
#include "sums.hpp"

namespace elasticdl {

// A collective has failed, and with it all that follow.
struct MeshFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The parameters that both ends of every connection must agree on before a collective; sent before the data.
struct CallHeader {
  uint32_t number;
  uint16_t verb;
  uint16_t type;
  uint64_t count;
};

// Bytes that go to, or come from, one peer.  A gate is an event that must have happened before.
struct Segment {
  static constexpr int32_t kNone = -1;
  char* data;
  size_t size;
  int32_t gate = kNone;
  int32_t event = kNone;  // that needs this segment
};

// The action once all its segments are through: a sum, or nothing.
struct Event {
  size_t num_missing;
  size_t count = 0;
  void* sum = nullptr;
  std::vector<const void*> sources;  // by rank
};

// A collective as the segments of each peer, in the order in which both ends of a connection move them.
struct Call {
  // One direction of a connection.
  struct Stream {
    std::vector<Segment> segments;
    size_t next = 0;
    size_t offset = 0;  // in the next one
    bool is_over() const { return next == segments.size(); }
  };
  struct Peer {
    Stream out, in;
    CallHeader header{};      // the call of the other end
    bool is_ignored = false;  // it is through, and has sent what belongs to later calls, or its farewell
  };

  CallHeader header{};
  const ElementType* type = nullptr;
  std::vector<Peer> peers;  // by rank
  std::vector<Event> events;
  std::function<void(Call&)> plan;  // makes the segments, when the calls before have ended
  size_t num_segments = 0;          // that are not through
  bool is_large = false;
  bool is_done = false;
};

class Mesh {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Ticket = std::shared_ptr<Call>;

  // Owns the sockets, one of each rank but its own, for which there is -1; record layers of those that are encrypted.
  Mesh(int rank, std::vector<int> sockets, std::vector<std::shared_ptr<RecordLayer>> records);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Begin a collective; the memory belongs to it until `wait` has returned true or thrown.
  Ticket all_reduce(char* data, uint64_t count, const std::string& type);
  Ticket all_gather(const char* data, uint64_t size, const std::vector<char*>& into);
  Ticket broadcast(char* data, uint64_t size, int source);

  // Whether the collective has ended by then; may return early for a signal.  Throws MeshFailure.
  bool wait(const Ticket& call, Time end);
  // The rank of a peer whose connection has ended without a farewell; -1: there is none.
  int gone();
  // Any thread: makes what is under way fail, here and at the peers.
  void interrupt();
  // Says farewell if nothing has failed, and frees everything.
  void close();

 private:
  Ticket begin(uint16_t verb, uint16_t type, uint64_t count, uint64_t size, std::function<void(Call&)> plan);
  void add(Call& call, size_t rank, bool is_out, Segment segment) const;
  char* scratch(size_t size);
  void plan_exchange(Call& call, char* data, uint64_t count);
  void plan_scatter_and_gather(Call& call, char* data, uint64_t count);
  void plan_chain(Call& call, char* data, uint64_t size, size_t source) const;

  void run_in_background();
  bool advance(std::unique_lock<std::mutex>& lock, Time end);
  bool run(Call& call, Time end);
  bool move(Call& call, size_t rank, bool is_out);
  bool wait_for_peers(Call& call, Time end) const;
  Wire wire(size_t rank) const { return {sockets_[rank], records_[rank].get()}; }
  void look_after(Call& call, size_t rank) const;
  void finish_segment(Call& call, size_t rank, bool is_out) const;

  const size_t rank_;
  std::vector<int> sockets_;
  std::vector<std::shared_ptr<RecordLayer>> records_;  // by rank; null: in clear
  std::unique_ptr<char[]> scratch_;
  size_t scratch_size_ = 0;
  uint32_t num_calls_ = 0;
  std::atomic<bool> is_interrupted_{false};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Ticket> waiting_;  // the first one is under way, or next
  bool is_running_ = false;     // some thread moves the first one's segments
  size_t num_large_ = 0;        // of those that wait
  bool is_closed_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace elasticdl
