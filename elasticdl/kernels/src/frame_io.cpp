// Frames on stream sockets, sent and received whole without the GIL; their checksum is made while they are in the cache.
// rpc/frames.py says what a frame is, ps/tensor_sockets.py what comes before it.
#include <pybind11/pybind11.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "crc32c.hpp"
#include "record_layer.hpp"

namespace elasticdl {
namespace {

constexpr size_t kPieceBytes = 512 << 10;
constexpr size_t kMostParts = 512;  // of one sendmsg; Linux takes 1,024
constexpr uint64_t kLargest = uint64_t{1} << 47;  // bytes: no machine holds more

struct Head {
  uint32_t number;
  uint32_t nothing;
  uint64_t size;
};

struct Prefix {
  uint32_t magic;
  uint32_t checksum;
};

struct Ended {};
struct Failed {
  int error;
};

// When a piece must have been transferred.  The time-outs of the socket wake a call that waits; a call that they end with
// a part of its piece is continued only before the deadline, so that no peer holds a connection by single bytes.
class Deadline {
 public:
  // 0 seconds: none.
  explicit Deadline(double seconds) : is_set_(seconds > 0) {
    if (is_set_) end_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  void check() const {
    if (is_set_ && Clock::now() >= end_) throw Failed{EAGAIN};
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool is_set_;
  Clock::time_point end_{};
};

// Runs a signal's Python handler, as Python's own sockets do.
void interrupted() {
  const py::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Bytes; nothing: of a record only a part is through.
template <typename Call>
std::optional<size_t> transferred(Call call) {
  while (true) {
    const ssize_t count = call();
    if (count >= 0) return static_cast<size_t>(count);
    if (errno == EINPROGRESS) return std::nullopt;
    if (errno != EINTR) throw Failed{errno};
    interrupted();
  }
}

// Drops what has been transferred from the front.
void advance(iovec** parts, size_t* num_parts, size_t count) {
  while (*num_parts > 0 && count >= (*parts)->iov_len) {
    count -= (*parts)->iov_len;
    ++*parts;
    --*num_parts;
  }
  if (*num_parts > 0) {
    (*parts)->iov_base = static_cast<char*>((*parts)->iov_base) + count;
    (*parts)->iov_len -= count;
  }
}

void fill(const Wire& wire, iovec* parts, size_t num_parts, const Deadline& deadline) {
  advance(&parts, &num_parts, 0);
  while (num_parts > 0) {
    const std::optional<size_t> count = transferred([&] { return wire.receive(parts, num_parts, MSG_WAITALL); });
    if (count == size_t{0}) throw Ended{};
    advance(&parts, &num_parts, count.value_or(0));
    if (num_parts > 0) deadline.check();
  }
}

// Waits for the first byte for as long as it takes, whatever the time-out of the socket, then for the others.
void fill_head(const Wire& wire, char* head, size_t size, double within_s) {
  ssize_t count = 0;
  do {
    iovec part{head, size};
    count = wire.receive(&part, 1, MSG_WAITALL);
    if (count < 0 && errno == EINTR) interrupted();
  } while (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  if (count < 0 && errno != EINPROGRESS) throw Failed{errno};
  if (count == 0) throw Ended{};
  const size_t here = count < 0 ? 0 : static_cast<size_t>(count);
  iovec rest{head + here, size - here};
  fill(wire, &rest, 1, Deadline(within_s));
}

void send_all(const Wire& wire, iovec* parts, size_t num_parts, const Deadline& deadline) {
  while (num_parts > 0) {
    const size_t most = std::min(num_parts, kMostParts);
    advance(&parts, &num_parts, transferred([&] { return wire.send(parts, most, MSG_NOSIGNAL); }).value_or(0));
    if (num_parts > 0) deadline.check();
  }
}

// All of a frame, its prefix last; returns the checksum of the rest.
uint32_t fill_frame(const Wire& wire, char* frame, size_t size, double within_s) {
  const size_t first = std::min(size, sizeof(Prefix));
  uint32_t checksum = 0;
  size_t place = first;
  do {
    const size_t count = std::min(kPieceBytes, size - place);
    const bool is_last = place + count == size;
    iovec parts[] = {{frame + place, count}, {frame, is_last ? first : 0}};
    fill(wire, parts, is_last ? 2 : 1, Deadline(within_s));
    checksum = crc32c(checksum, frame + place, count);
    place += count;
  } while (place < size);
  return checksum;
}

// A frame's parts without its prefix, kept where they are.
class Parts {
 public:
  explicit Parts(const py::sequence& parts) {
    for (const py::handle part : parts) {
      views_.emplace_back();
      if (PyObject_GetBuffer(part.ptr(), &views_.back(), PyBUF_SIMPLE) != 0) {
        views_.pop_back();
        release();
        throw py::error_already_set();
      }
      size_ += static_cast<size_t>(views_.back().len);
    }
  }
  ~Parts() { release(); }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  void send(const Wire& wire, uint32_t number, uint32_t magic, double within_s) const {
    Head head{number, 0, size_ + sizeof(Prefix)};
    Prefix prefix{magic, 0};
    std::vector<iovec> waiting{{&head, sizeof(head)}};
    size_t room = kPieceBytes;
    for (const Py_buffer& view : views_) {
      char* data = static_cast<char*>(view.buf);
      for (size_t left = static_cast<size_t>(view.len); left > 0;) {
        if (room == 0) {
          send_all(wire, waiting.data(), waiting.size(), Deadline(within_s));
          waiting.clear();
          room = kPieceBytes;
        }
        const size_t count = std::min(left, room);
        prefix.checksum = crc32c(prefix.checksum, data, count);
        waiting.push_back({data, count});
        data += count;
        left -= count;
        room -= count;
      }
    }
    waiting.push_back({&prefix, sizeof(prefix)});  // with the last piece: alone it would wake the other end once more
    send_all(wire, waiting.data(), waiting.size(), Deadline(within_s));
  }

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
  }

  std::vector<Py_buffer> views_;
  size_t size_ = 0;
};

template <typename Work>
void without_gil(Work work) {
  try {
    const py::gil_scoped_release released;
    work();
  } catch (const Ended&) {
    PyErr_SetString(PyExc_EOFError, "the connection was closed");
    throw py::error_already_set();
  } catch (const Failed& failed) {
    errno = failed.error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

py::array_t<uint8_t> new_bytes(uint64_t size) {
  if (size > kLargest) throw std::bad_alloc();
  return new_array<uint8_t>({static_cast<py::ssize_t>(size)});
}

py::array_t<uint8_t> received(const Wire& wire, uint64_t size, double within_s) {
  auto bytes = new_bytes(size);
  iovec part{bytes.mutable_data(), size};
  without_gil([&] { fill(wire, &part, 1, Deadline(within_s)); });
  return bytes;
}

py::bytes receive_head(const Wire& wire, size_t size, double within_s) {
  std::string head(size, '\0');
  without_gil([&] { fill_head(wire, head.data(), size, within_s); });
  return head;
}

py::tuple receive_frame(const Wire& wire, uint64_t size, double within_s) {
  auto frame = new_bytes(size);
  char* data = reinterpret_cast<char*>(frame.mutable_data());
  uint32_t checksum = 0;
  without_gil([&] { checksum = fill_frame(wire, data, size, within_s); });
  return py::make_tuple(frame, checksum);
}

void discard(const Wire& wire, uint64_t size, double within_s) {
  without_gil([&] {
    std::vector<char> piece(std::min<uint64_t>(size, kPieceBytes));
    for (uint64_t left = size; left > 0;) {
      iovec part{piece.data(), std::min<uint64_t>(left, piece.size())};
      left -= part.iov_len;
      fill(wire, &part, 1, Deadline(within_s));
    }
  });
}

void send_frame(const Wire& wire, uint32_t number, const py::sequence& parts, uint32_t magic, double within_s) {
  const Parts frame(parts);
  without_gil([&] { frame.send(wire, number, magic, within_s); });
}

py::tuple call(const Wire& wire, uint32_t number, const py::sequence& parts, uint32_t magic) {
  const Parts frame(parts);
  Head head{};
  without_gil([&] {
    frame.send(wire, number, magic, 0);
    iovec part{&head, sizeof(head)};
    fill(wire, &part, 1, Deadline(0));
  });
  if (head.number != 0) return py::make_tuple(head.number, received(wire, head.size, 0), 0);
  const py::tuple reply = receive_frame(wire, head.size, 0);
  return py::make_tuple(head.number, reply[0], reply[1]);
}

// A function of a wire, as one of a descriptor and a record layer, or None.
template <typename Result, typename... Arguments>
auto on_socket(Result (*function)(const Wire&, Arguments...)) {
  return [function](int socket, RecordLayer* records, Arguments... arguments) {
    return function(Wire{socket, records}, arguments...);
  };
}

}  // namespace

void bind_frame_io(py::module_& module) {
  const py::arg socket("socket"), records("records"), size("size"), within_s("within_s");
  const py::arg number("number"), parts("parts"), magic("magic");
  module.def("receive_head", on_socket(&receive_head), socket, records, size, within_s);
  module.def("receive_frame", on_socket(&receive_frame), socket, records, size, within_s);
  module.def("discard", on_socket(&discard), socket, records, size, within_s);
  module.def("send_frame", on_socket(&send_frame), socket, records, number, parts, magic, within_s);
  module.def("call", on_socket(&call), socket, records, number, parts, magic);
}

}  // namespace elasticdl
