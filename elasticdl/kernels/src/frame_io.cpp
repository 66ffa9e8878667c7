// Frames on stream sockets, sent and received whole without the GIL; their checksum is made while they are in the cache.
// rpc/frames.py says what a frame is, ps/tensor_sockets.py what comes before it.
#include <pybind11/pybind11.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "crc32c.hpp"

namespace elasticdl {
namespace {

constexpr size_t kPieceBytes = 512 << 10;
constexpr size_t kMostParts = 512;  // of one sendmsg; Linux takes 1,024

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

// Runs a signal's Python handler, as Python's own sockets do.
void interrupted() {
  const py::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

template <typename Call>
size_t transferred(Call call) {
  while (true) {
    const ssize_t count = call();
    if (count >= 0) return static_cast<size_t>(count);
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

void fill(int socket, iovec* parts, size_t num_parts) {
  advance(&parts, &num_parts, 0);
  while (num_parts > 0) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const size_t count = transferred([&] { return recvmsg(socket, &message, MSG_WAITALL); });
    if (count == 0) throw Ended{};
    advance(&parts, &num_parts, count);
  }
}

void send_all(int socket, iovec* parts, size_t num_parts) {
  while (num_parts > 0) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = std::min(num_parts, kMostParts);
    advance(&parts, &num_parts, transferred([&] { return sendmsg(socket, &message, MSG_NOSIGNAL); }));
  }
}

// All of a frame, its prefix last; returns the checksum of the rest.
uint32_t fill_frame(int socket, char* frame, size_t size) {
  const size_t first = std::min(size, sizeof(Prefix));
  uint32_t checksum = 0;
  size_t place = first;
  do {
    const size_t count = std::min(kPieceBytes, size - place);
    const bool is_last = place + count == size;
    iovec parts[] = {{frame + place, count}, {frame, is_last ? first : 0}};
    fill(socket, parts, is_last ? 2 : 1);
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

  void send(int socket, uint32_t number, uint32_t magic) const {
    Head head{number, 0, size_ + sizeof(Prefix)};
    Prefix prefix{magic, 0};
    std::vector<iovec> waiting{{&head, sizeof(head)}};
    size_t room = kPieceBytes;
    for (const Py_buffer& view : views_) {
      char* data = static_cast<char*>(view.buf);
      for (size_t left = static_cast<size_t>(view.len); left > 0;) {
        if (room == 0) {
          send_all(socket, waiting.data(), waiting.size());
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
    send_all(socket, waiting.data(), waiting.size());
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

py::array_t<uint8_t> received(int socket, uint64_t size) {
  auto bytes = new_array<uint8_t>({static_cast<py::ssize_t>(size)});
  iovec part{bytes.mutable_data(), size};
  without_gil([&] { fill(socket, &part, 1); });
  return bytes;
}

py::tuple receive_frame(int socket, uint64_t size) {
  auto frame = new_array<uint8_t>({static_cast<py::ssize_t>(size)});
  char* data = reinterpret_cast<char*>(frame.mutable_data());
  uint32_t checksum = 0;
  without_gil([&] { checksum = fill_frame(socket, data, size); });
  return py::make_tuple(frame, checksum);
}

void send_frame(int socket, uint32_t number, const py::sequence& parts, uint32_t magic) {
  const Parts frame(parts);
  without_gil([&] { frame.send(socket, number, magic); });
}

py::tuple call(int socket, uint32_t number, const py::sequence& parts, uint32_t magic) {
  const Parts frame(parts);
  Head head{};
  without_gil([&] {
    frame.send(socket, number, magic);
    iovec part{&head, sizeof(head)};
    fill(socket, &part, 1);
  });
  if (head.number != 0) return py::make_tuple(head.number, received(socket, head.size), 0);
  const py::tuple reply = receive_frame(socket, head.size);
  return py::make_tuple(head.number, reply[0], reply[1]);
}

}  // namespace

void bind_frame_io(py::module_& module) {
  module.def("receive", &received, py::arg("socket"), py::arg("size"));
  module.def("receive_frame", &receive_frame, py::arg("socket"), py::arg("size"));
  module.def("send_frame", &send_frame, py::arg("socket"), py::arg("number"), py::arg("parts"), py::arg("magic"));
  module.def("call", &call, py::arg("socket"), py::arg("number"), py::arg("parts"), py::arg("magic"));
}

}  // namespace elasticdl
