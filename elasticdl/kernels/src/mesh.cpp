// All members make the same calls in the same order.  A small sum is one hop: each sends its values to all and sums what
// it gets.  Of a large one every member sums a part that all others send to it, piece by piece, and sends back what
// comes of it; so all hold the same bits.  A call's bytes on each connection, their order and what they wait for are
// planned when it starts; one loop then moves them all, and waits in `poll` alone.
#include "mesh.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#ifndef POLLRDHUP
#define POLLRDHUP 0  // then the end of a peer that is through is seen in the next call
#endif

namespace elasticdl {
namespace {

constexpr size_t kPieceBytes = 256 << 10;    // of a sum: received values are added while they are in the cache
constexpr size_t kAhead = 8;                 // pieces that are sent before the first sum comes back
constexpr size_t kExchangedBytes = 64 << 10;  // that one member receives of a sum in one hop
constexpr size_t kDirectBytes = 64 << 10;    // of a broadcast that its source sends to each
constexpr size_t kLargeBytes = 64 << 10;     // a call that continues while its caller does something else
constexpr size_t kMostParts = 16;            // of one sendmsg or recvmsg

constexpr char kInterrupted[] = "the connections were closed here";

enum Verb : uint16_t { kFarewell, kAllReduce, kAllGather, kBroadcast };

struct Parts {
  iovec parts[kMostParts];
  size_t count = 0;
};

}  // namespace

Mesh::Mesh(int rank, std::vector<int> sockets, std::vector<std::shared_ptr<RecordLayer>> records)
    : rank_(static_cast<size_t>(rank)), sockets_(std::move(sockets)), records_(std::move(records)) {
  records_.resize(sockets_.size());
}

Mesh::~Mesh() { close(); }

Mesh::Ticket Mesh::all_reduce(char* data, uint64_t count, const std::string& name) {
  const ElementType* type = element_type(name);
  if (type == nullptr) throw std::invalid_argument("elements of type " + name + " cannot be summed");
  const size_t size = count * type->size;
  const bool is_small = size * (sockets_.size() - 1) <= kExchangedBytes;
  return begin(kAllReduce, type->id, count, size, [=](Call& call) {
    call.type = type;
    is_small ? plan_exchange(call, data, count) : plan_scatter_and_gather(call, data, count);
  });
}

Mesh::Ticket Mesh::all_gather(const char* data, uint64_t size, const std::vector<char*>& into) {
  return begin(kAllGather, 0, size, size, [=](Call& call) {
    std::memcpy(into[rank_], data, size);
    for (size_t rank = 0; rank < sockets_.size(); ++rank) {
      add(call, rank, true, {const_cast<char*>(data), size});
      add(call, rank, false, {into[rank], size});
    }
  });
}

Mesh::Ticket Mesh::broadcast(char* data, uint64_t size, int source_rank) {
  const auto source = static_cast<size_t>(source_rank);
  return begin(kBroadcast, static_cast<uint16_t>(source), size, size, [=](Call& call) {
    if (size > kDirectBytes && sockets_.size() > 2) return plan_chain(call, data, size, source);
    for (size_t rank = 0; rank < sockets_.size() && rank_ == source; ++rank) add(call, rank, true, {data, size});
    if (rank_ != source) add(call, source, false, {data, size});
  });
}

Mesh::Ticket Mesh::begin(uint16_t verb, uint16_t type, uint64_t count, uint64_t size, std::function<void(Call&)> plan) {
  auto call = std::make_shared<Call>();
  call->plan = std::move(plan);
  call->is_large = size >= kLargeBytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw MeshFailure(failure_);
  call->header = {num_calls_++, verb, type, count};
  waiting_.push_back(call);
  if (!call->is_large) return call;  // its waiter moves it: to wake another thread would take longer
  ++num_large_;
  if (!thread_.joinable()) {
    sigset_t all, before;
    sigfillset(&all);  // signals are for Python's threads
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run_in_background(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  changed_.notify_all();
  return call;
}

// A segment of a stream, behind the header if it is the first.  Nothing is sent to oneself.
void Mesh::add(Call& call, size_t rank, bool is_out, Segment segment) const {
  if (rank == rank_) return;
  Call::Peer& peer = call.peers[rank];
  std::vector<Segment>& segments = (is_out ? peer.out : peer.in).segments;
  if (segments.empty()) {
    char* header = reinterpret_cast<char*>(is_out ? &call.header : &peer.header);
    segments.push_back({header, sizeof(CallHeader)});
    ++call.num_segments;
  }
  if (segment.size == 0) return;
  segments.push_back(segment);
  ++call.num_segments;
}

char* Mesh::scratch(size_t size) {
  if (size > scratch_size_) {
    scratch_.reset();
    scratch_.reset(new char[size]);
    scratch_size_ = size;
  }
  return scratch_.get();
}

void Mesh::plan_exchange(Call& call, char* data, uint64_t count) {
  const size_t num_members = sockets_.size(), size = count * call.type->size;
  char* slot = scratch(num_members * size);
  // Its own values are sent to all before the sum takes their place.
  Event sum{2 * (num_members - 1), count, data, {}};
  for (size_t rank = 0; rank < num_members; ++rank, slot += size) {
    add(call, rank, true, {data, size, Segment::kNone, 0});
    add(call, rank, false, {slot, size, Segment::kNone, 0});
    sum.sources.push_back(rank == rank_ ? data : slot);
  }
  call.events.push_back(std::move(sum));
}

// Each connection carries, in both directions: values of piece 0 to kAhead, the sum of piece 0, values of the next
// piece, the sum of piece 1 …  The values are of the receiver's part, the sums of the sender's.  A piece's values are
// received when the sum is made whose memory they take.  No member waits in a circle: a piece depends on pieces
// before it.  A sum takes the place of values that have been sent: it was made of them.
void Mesh::plan_scatter_and_gather(Call& call, char* data, uint64_t count) {
  const size_t num_members = sockets_.size(), element = call.type->size;
  const size_t line = 64 / element, per_piece = kPieceBytes / element;
  const uint64_t per_member = ((count + num_members - 1) / num_members + line - 1) / line * line;
  const auto start_of = [=](size_t rank) { return std::min(count, rank * per_member); };
  const auto piece = [=](size_t rank, size_t number) {
    const uint64_t end = start_of(rank + 1), start = std::min(end, start_of(rank) + number * per_piece);
    return Segment{data + start * element, std::min<uint64_t>(per_piece, end - start) * element};
  };
  const size_t num_pieces = (per_member + per_piece - 1) / per_piece;
  const size_t num_slots = std::min(kAhead + 1, num_pieces);
  char* slots = scratch(num_slots * num_members * kPieceBytes);
  for (size_t number = 0; number < num_pieces; ++number) {
    const Segment own = piece(rank_, number);
    Event sum{own.size > 0 ? num_members - 1 : 0, own.size / element, own.data, {}};
    for (size_t rank = 0; rank < num_members; ++rank) {
      char* slot = slots + (number % num_slots * num_members + rank) * kPieceBytes;
      sum.sources.push_back(rank == rank_ ? own.data : slot);
      add(call, rank, true, piece(rank, number));
      const auto slot_is_free = number < num_slots ? Segment::kNone : static_cast<int32_t>(number - num_slots);
      add(call, rank, false, {slot, own.size, slot_is_free, static_cast<int32_t>(number)});
      if (number < kAhead) continue;
      Segment summed = piece(rank_, number - kAhead);
      summed.gate = static_cast<int32_t>(number - kAhead);
      add(call, rank, true, summed);
      add(call, rank, false, piece(rank, number - kAhead));
    }
    call.events.push_back(std::move(sum));
  }
  for (size_t number = num_pieces - std::min(num_pieces, kAhead); number < num_pieces; ++number) {
    for (size_t rank = 0; rank < num_members; ++rank) {
      Segment summed = piece(rank_, number);
      summed.gate = static_cast<int32_t>(number);
      add(call, rank, true, summed);
      add(call, rank, false, piece(rank, number));
    }
  }
}

// From the source to the next rank, from there to the next but one …, piece by piece.
void Mesh::plan_chain(Call& call, char* data, uint64_t size, size_t source) const {
  const size_t num_members = sockets_.size(), place = (rank_ + num_members - source) % num_members;
  const size_t before = (rank_ + num_members - 1) % num_members, after = (rank_ + 1) % num_members;
  for (uint64_t start = 0; start < size; start += kPieceBytes) {
    const size_t length = std::min<uint64_t>(kPieceBytes, size - start);
    const auto number = static_cast<int32_t>(call.events.size());
    call.events.push_back({place == 0 ? size_t{0} : size_t{1}, 0, nullptr, {}});
    if (place > 0) add(call, before, false, {data + start, length, Segment::kNone, number});
    if (place + 1 < num_members) add(call, after, true, {data + start, length, number});
  }
}

bool Mesh::wait(const Ticket& call, Time end) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!call->is_done) {
    if (is_running_) {
      if (changed_.wait_until(lock, end) == std::cv_status::timeout && is_running_) return false;
    } else if (!failure_.empty()) {
      throw MeshFailure(failure_);  // and nothing writes to its memory any more
    } else if (!advance(lock, end)) {
      return false;
    }
  }
  return true;
}

void Mesh::run_in_background() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_closed_ || (num_large_ > 0 && !is_running_ && failure_.empty()); });
    if (is_closed_) return;
    advance(lock, Time::max());
  }
}

// Moves the first of the calls that wait; false: the time is over, or a signal has come.
bool Mesh::advance(std::unique_lock<std::mutex>& lock, Time end) {
  const Ticket call = waiting_.front();
  is_running_ = true;
  lock.unlock();
  bool is_over = false;
  std::string failure;
  try {
    is_over = run(*call, end);
  } catch (const MeshFailure& error) {
    // The thread that closes the connections here sees them end, too.
    failure = is_interrupted_.load(std::memory_order_relaxed) ? kInterrupted : error.what();
  } catch (const std::bad_alloc&) {
    failure = "out of memory";
  } catch (const CipherError& error) {
    failure = error.what();
  }
  lock.lock();
  is_running_ = false;
  if (!failure.empty() && failure_.empty()) failure_ = failure;
  if (is_over) {
    call->is_done = true;
    num_large_ -= call->is_large;
    waiting_.pop_front();
  }
  changed_.notify_all();
  return is_over || !failure.empty();
}

bool Mesh::run(Call& call, Time end) {
  if (call.plan) {
    call.peers.resize(sockets_.size());
    call.plan(call);
    call.plan = nullptr;
  }
  const size_t num_members = sockets_.size();
  while (call.num_segments > 0) {
    if (is_interrupted_.load(std::memory_order_relaxed)) throw MeshFailure(kInterrupted);
    bool has_moved = false;
    for (const bool is_out : {true, false}) {
      for (size_t other = 1; other < num_members; ++other) {
        has_moved |= move(call, (rank_ + other) % num_members, is_out);
      }
    }
    if (!has_moved && call.num_segments > 0 && !wait_for_peers(call, end)) return false;
  }
  return true;
}

namespace {

bool is_open(const Call& call, int32_t gate) {
  return gate == Segment::kNone || call.events[static_cast<size_t>(gate)].num_missing == 0;
}

bool can_move(const Call& call, const Call::Stream& stream) {
  return !stream.is_over() && is_open(call, stream.segments[stream.next].gate);
}

[[noreturn]] void fail(size_t rank, const std::string& what) {
  throw MeshFailure("rank " + std::to_string(rank) + " " + what);
}

Parts next_parts(const Call& call, const Call::Stream& stream) {
  Parts found;
  size_t offset = stream.offset;
  for (size_t n = stream.next; n < stream.segments.size() && found.count < kMostParts; ++n, offset = 0) {
    const Segment& segment = stream.segments[n];
    if (!is_open(call, segment.gate)) break;
    found.parts[found.count++] = {segment.data + offset, segment.size - offset};
  }
  return found;
}

}  // namespace

// Sends or receives as much as can be at once.
bool Mesh::move(Call& call, size_t rank, bool is_out) {
  Call::Stream& stream = is_out ? call.peers[rank].out : call.peers[rank].in;
  if (!can_move(call, stream)) return false;
  Parts parts = next_parts(call, stream);
  ssize_t moved = -1;
  try {
    moved = is_out ? wire(rank).send(parts.parts, parts.count, MSG_DONTWAIT | MSG_NOSIGNAL)
                   : wire(rank).receive(parts.parts, parts.count, MSG_DONTWAIT);
  } catch (const RecordError& error) {
    fail(rank, std::string("has sent ") + error.what());
  }
  if (moved < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == EINPROGRESS) return false;
    fail(rank, "has gone");
  }
  if (moved == 0) fail(rank, "has gone");
  auto left = static_cast<size_t>(moved);
  while (left > 0) {
    const size_t step = std::min(left, stream.segments[stream.next].size - stream.offset);
    left -= step;
    stream.offset += step;
    if (stream.offset == stream.segments[stream.next].size) finish_segment(call, rank, is_out);
  }
  return true;
}

void Mesh::finish_segment(Call& call, size_t rank, bool is_out) const {
  Call::Peer& peer = call.peers[rank];
  Call::Stream& stream = is_out ? peer.out : peer.in;
  if (!is_out && stream.next == 0 && std::memcmp(&peer.header, &call.header, sizeof(CallHeader)) != 0) {
    fail(rank, peer.header.verb == kFarewell ? "has left" : "does something else than this member");
  }
  const int32_t event_number = stream.segments[stream.next].event;
  ++stream.next;
  stream.offset = 0;
  --call.num_segments;
  if (event_number == Segment::kNone) return;
  Event& event = call.events[static_cast<size_t>(event_number)];
  if (--event.num_missing == 0 && event.sum != nullptr) {
    call.type->sum(event.sources.data(), event.sources.size(), event.count, event.sum);
  }
}

// Waits until something can be moved, or a peer has gone; false: the time is over, or a signal has come.
bool Mesh::wait_for_peers(Call& call, Time end) const {
  std::vector<pollfd> polled(sockets_.size());
  for (size_t rank = 0; rank < sockets_.size(); ++rank) {
    Call::Peer& peer = call.peers[rank];
    short events = 0;
    if (can_move(call, peer.in)) events |= POLLIN;
    if (can_move(call, peer.out)) events |= POLLOUT;
    if (peer.in.is_over() && peer.out.is_over() && !peer.is_ignored) events |= POLLRDHUP;
    polled[rank] = {events != 0 ? sockets_[rank] : -1, events, 0};
  }
  int timeout_ms = -1;
  if (end != Time::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()).count();
    if (left <= 0) return false;
    timeout_ms = static_cast<int>(std::min<int64_t>(left, 1 << 30));
  }
  const int num_ready = poll(polled.data(), polled.size(), timeout_ms);
  if (num_ready < 0) return false;
  for (size_t rank = 0; rank < polled.size(); ++rank) {
    const Call::Peer& peer = call.peers[rank];
    if (polled[rank].revents != 0 && peer.in.is_over() && peer.out.is_over()) look_after(call, rank);
  }
  return num_ready > 0;
}

// A peer that is through has closed its connection: it has left in good order, unless nothing more comes of it.
void Mesh::look_after(Call& call, size_t rank) const {
  char first;
  const ssize_t count = recv(sockets_[rank], &first, 1, MSG_PEEK | MSG_DONTWAIT);
  if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) fail(rank, "has gone");
  call.peers[rank].is_ignored = true;
}

int Mesh::gone() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t rank = 0; rank < sockets_.size() && !is_closed_; ++rank) {
    char first;
    if (rank == rank_) continue;
    const ssize_t count = recv(sockets_[rank], &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return static_cast<int>(rank);
  }
  return -1;
}

void Mesh::interrupt() {
  is_interrupted_.store(true, std::memory_order_relaxed);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_closed_) return;
  for (const int socket : sockets_) {
    if (socket >= 0) shutdown(socket, SHUT_RDWR);
  }
}

void Mesh::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_closed_) return;
  const bool is_in_order = failure_.empty() && waiting_.empty() && !is_interrupted_.load(std::memory_order_relaxed);
  if (failure_.empty()) failure_ = "the connections are closed";
  CallHeader farewell{num_calls_, kFarewell, 0, 0};
  is_interrupted_.store(true, std::memory_order_relaxed);
  for (size_t rank = 0; rank < sockets_.size(); ++rank) {
    if (sockets_[rank] < 0) continue;
    if (is_in_order) {
      iovec part{&farewell, sizeof(farewell)};
      wire(rank).send(&part, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
      shutdown(sockets_[rank], SHUT_RDWR);
    }
  }
  changed_.wait(lock, [&] { return !is_running_; });
  is_closed_ = true;
  changed_.notify_all();
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  for (const int socket : sockets_) {
    if (socket >= 0) ::close(socket);
  }
}

}  // namespace elasticdl
