// The records of an encrypted connection: AES-256-GCM, computed by the libcrypto of this Python process.
//
// A record is its size (u32, of the plain bytes; authenticated, too), as many encrypted bytes, and a tag of 16.  Each
// direction has a key of its own and counts its records, which is the nonce: a record that was changed, repeated, left
// out or moved does not open.  After this number of records both ends derive the next key from the last one.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace elasticdl {

// The received record is not the next one of the other end.
struct RecordError : std::runtime_error {
  RecordError() : std::runtime_error("a record that was changed, repeated, left out or moved on its way") {}
};

// There is no libcrypto, or it refuses to work.
struct CipherError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Finds libcrypto; `library` is one that was linked with it, or empty: the program itself.  Throws CipherError.
void load_libcrypto(const std::string& library);

// Both directions at one end of a connection; one thread at a time.
class RecordLayer {
 public:
  static constexpr size_t kMostBytes = 128 << 10;  // of plain bytes in a record

  RecordLayer(const std::string& out_key, const std::string& in_key, uint64_t records_per_key);
  ~RecordLayer();

  // As sendmsg and recvmsg, in plain bytes.  -1 and EINPROGRESS: a part of a record is through; call again, and what is
  // sent must begin with the same bytes.  `receive` throws RecordError.
  ssize_t send(int socket, const iovec* parts, size_t num_parts, int flags);
  ssize_t receive(int socket, const iovec* parts, size_t num_parts, int flags);

  // Without a socket: the records of some bytes, and the bytes of the records that are whole with what has come.
  std::string seal(const char* data, size_t size);
  std::string open(const char* data, size_t size);
  // A part of a record has come.
  bool is_amid_record() const { return filled_ > 0; }

 private:
  class Direction;

  void seal_next(const iovec* parts, size_t num_parts);
  size_t num_missing();
  size_t open_next(const iovec* parts, size_t num_parts);
  size_t take(const iovec* parts, size_t num_parts);

  std::unique_ptr<Direction> out_, in_;
  std::vector<char> sealed_;  // the record on its way out
  size_t sealed_size_ = 0, sealed_plain_ = 0, num_sent_ = 0;
  std::vector<char> arriving_;  // the record that comes
  size_t filled_ = 0;
  const char* opened_ = nullptr;  // of the last one, in the same memory: the rest not taken yet
  size_t num_opened_ = 0;
};

// A stream socket, in clear without a record layer.
struct Wire {
  int socket;
  RecordLayer* records = nullptr;

  // As sendmsg and recvmsg; see `RecordLayer`.
  ssize_t send(iovec* parts, size_t num_parts, int flags) const;
  ssize_t receive(iovec* parts, size_t num_parts, int flags) const;
};

}  // namespace elasticdl
