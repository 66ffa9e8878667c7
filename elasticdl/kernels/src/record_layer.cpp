#include "record_layer.hpp"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace elasticdl {
namespace {

constexpr size_t kKeyBytes = 32, kTagBytes = 16, kNonceBytes = 12;
constexpr size_t kHeadBytes = sizeof(uint32_t);
constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG
constexpr char kNextKey[] = "elasticdl next key\1";  // HKDF-Expand's only block: its purpose, and its number

// The used part of libcrypto: the same functions in 1.1 and 3.
struct LibCrypto {
  void* (*new_context)();
  void (*free_context)(void*);
  const void* (*aes_256_gcm)();
  const void* (*sha256)();
  int (*begin_encryption)(void*, const void*, void*, const unsigned char*, const unsigned char*);
  int (*encrypt)(void*, unsigned char*, int*, const unsigned char*, int);
  int (*end_encryption)(void*, unsigned char*, int*);
  int (*begin_decryption)(void*, const void*, void*, const unsigned char*, const unsigned char*);
  int (*decrypt)(void*, unsigned char*, int*, const unsigned char*, int);
  int (*end_decryption)(void*, unsigned char*, int*);
  int (*control)(void*, int, int, void*);
  unsigned char* (*hmac)(const void*, const void*, int, const unsigned char*, size_t, unsigned char*, unsigned int*);
};

LibCrypto crypto{};
bool is_loaded = false;

template <typename Function>
bool find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  return *function != nullptr;
}

// Looks in a library, and in those that it was linked with.
bool is_found_in(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  return library != nullptr && find(library, "EVP_CIPHER_CTX_new", &crypto.new_context) &&
         find(library, "EVP_CIPHER_CTX_free", &crypto.free_context) &&
         find(library, "EVP_aes_256_gcm", &crypto.aes_256_gcm) && find(library, "EVP_sha256", &crypto.sha256) &&
         find(library, "EVP_EncryptInit_ex", &crypto.begin_encryption) &&
         find(library, "EVP_EncryptUpdate", &crypto.encrypt) &&
         find(library, "EVP_EncryptFinal_ex", &crypto.end_encryption) &&
         find(library, "EVP_DecryptInit_ex", &crypto.begin_decryption) &&
         find(library, "EVP_DecryptUpdate", &crypto.decrypt) &&
         find(library, "EVP_DecryptFinal_ex", &crypto.end_decryption) &&
         find(library, "EVP_CIPHER_CTX_ctrl", &crypto.control) && find(library, "HMAC", &crypto.hmac);
}

void must(bool has_worked) {
  if (!has_worked) throw CipherError("libcrypto refuses to encrypt with AES-256-GCM");
}

unsigned char* bytes_of(char* data) { return reinterpret_cast<unsigned char*>(data); }
const unsigned char* bytes_of(const char* data) { return reinterpret_cast<const unsigned char*>(data); }

// Calls `work` with each stretch of the parts' first bytes; returns how many there are, at most `most`.
template <typename Work>
size_t for_each_stretch(const iovec* parts, size_t num_parts, size_t most, Work work) {
  size_t total = 0;
  for (size_t n = 0; n < num_parts && total < most; ++n) {
    const size_t count = std::min(parts[n].iov_len, most - total);
    if (count > 0) work(static_cast<char*>(parts[n].iov_base), count);
    total += count;
  }
  return total;
}

}  // namespace

void load_libcrypto(const std::string& library) {
  if (is_loaded) return;
  const char* named = library.empty() ? nullptr : library.c_str();
  for (const char* path : {named, "libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.3.dylib"}) {
    if ((is_loaded = is_found_in(path))) return;
  }
  throw CipherError("no libcrypto (OpenSSL 1.1 or newer) was found, with which Python was built");
}

// A key, and the records that it was used for.
class RecordLayer::Direction {
 public:
  Direction(const std::string& key, bool encrypts, uint64_t records_per_key)
      : encrypts_(encrypts), records_per_key_(records_per_key), context_(crypto.new_context()) {
    if (key.size() != kKeyBytes) throw std::invalid_argument("a key of AES-256 has 32 bytes");
    if (records_per_key == 0) throw std::invalid_argument("records_per_key is 0");
    must(context_ != nullptr);
    std::copy(key.begin(), key.end(), key_.begin());
    use_key();
  }
  ~Direction() { crypto.free_context(context_); }
  Direction(const Direction&) = delete;
  Direction& operator=(const Direction&) = delete;

  void begin(const char* head) {
    if (num_records_ == records_per_key_) use_next_key();
    std::array<unsigned char, kNonceBytes> nonce{};
    for (size_t n = 0; n < sizeof(num_records_); ++n) nonce[n] = static_cast<unsigned char>(num_records_ >> 8 * n);
    ++num_records_;
    must((encrypts_ ? crypto.begin_encryption : crypto.begin_decryption)(context_, nullptr, nullptr, nullptr,
                                                                         nonce.data()) == 1);
    update(nullptr, head, kHeadBytes);
  }

  // Encrypts or decrypts the next bytes; `to` may be `from`.
  void update(char* to, const char* from, size_t size) {
    int count = 0;
    must((encrypts_ ? crypto.encrypt : crypto.decrypt)(context_, bytes_of(to), &count, bytes_of(from),
                                                       static_cast<int>(size)) == 1);
  }

  void end_encryption(char* tag) {
    int count = 0;
    must(crypto.end_encryption(context_, bytes_of(tag), &count) == 1);
    must(crypto.control(context_, kGetTag, kTagBytes, tag) == 1);
  }

  void end_decryption(char* tag) {
    int count = 0;
    must(crypto.control(context_, kSetTag, kTagBytes, tag) == 1);
    if (crypto.end_decryption(context_, bytes_of(tag), &count) != 1) throw RecordError();
  }

 private:
  void use_key() {
    must((encrypts_ ? crypto.begin_encryption : crypto.begin_decryption)(context_, crypto.aes_256_gcm(), nullptr,
                                                                         key_.data(), nullptr) == 1);
  }

  void use_next_key() {
    std::array<unsigned char, kKeyBytes> next{};
    unsigned int size = 0;
    must(crypto.hmac(crypto.sha256(), key_.data(), kKeyBytes, bytes_of(kNextKey), sizeof(kNextKey) - 1, next.data(),
                     &size) != nullptr &&
         size == kKeyBytes);
    key_ = next;
    use_key();
    num_records_ = 0;
  }

  const bool encrypts_;
  const uint64_t records_per_key_;
  void* const context_;
  std::array<unsigned char, kKeyBytes> key_{};
  uint64_t num_records_ = 0;
};

RecordLayer::RecordLayer(const std::string& out_key, const std::string& in_key, uint64_t records_per_key)
    : out_(std::make_unique<Direction>(out_key, true, records_per_key)),
      in_(std::make_unique<Direction>(in_key, false, records_per_key)) {}

RecordLayer::~RecordLayer() = default;

void RecordLayer::seal_next(const iovec* parts, size_t num_parts) {
  sealed_plain_ = for_each_stretch(parts, num_parts, kMostBytes, [](char*, size_t) {});
  const auto size = static_cast<uint32_t>(sealed_plain_);
  sealed_size_ = kHeadBytes + size + kTagBytes;
  if (sealed_.size() < sealed_size_) sealed_.resize(sealed_size_);
  num_sent_ = 0;
  std::memcpy(sealed_.data(), &size, kHeadBytes);
  out_->begin(sealed_.data());
  char* to = sealed_.data() + kHeadBytes;
  for_each_stretch(parts, num_parts, size, [&](char* from, size_t count) {
    out_->update(to, from, count);
    to += count;
  });
  out_->end_encryption(to);
}

ssize_t RecordLayer::send(int socket, const iovec* parts, size_t num_parts, int flags) {
  if (num_sent_ == sealed_size_) seal_next(parts, num_parts);
  const ssize_t count = ::send(socket, sealed_.data() + num_sent_, sealed_size_ - num_sent_, flags);
  if (count < 0) return count;
  num_sent_ += static_cast<size_t>(count);
  if (num_sent_ == sealed_size_) return static_cast<ssize_t>(sealed_plain_);
  errno = EINPROGRESS;
  return -1;
}

// Bytes until the head, then until the whole record is here, for which there is room.
size_t RecordLayer::num_missing() {
  if (arriving_.size() < kHeadBytes) arriving_.resize(kHeadBytes);
  if (filled_ < kHeadBytes) return kHeadBytes - filled_;
  uint32_t size;
  std::memcpy(&size, arriving_.data(), kHeadBytes);
  if (size == 0 || size > kMostBytes) throw RecordError();
  const size_t whole = kHeadBytes + size + kTagBytes;
  if (arriving_.size() < whole) arriving_.resize(whole);
  return whole - filled_;
}

// Opens the record that is here into the parts, and the rest into its own memory.
size_t RecordLayer::open_next(const iovec* parts, size_t num_parts) {
  const size_t size = filled_ - kHeadBytes - kTagBytes;
  in_->begin(arriving_.data());
  char* from = arriving_.data() + kHeadBytes;
  const size_t count = for_each_stretch(parts, num_parts, size, [&](char* to, size_t stretch) {
    in_->update(to, from, stretch);
    from += stretch;
  });
  if (count < size) in_->update(from, from, size - count);
  in_->end_decryption(arriving_.data() + kHeadBytes + size);
  opened_ = from;
  num_opened_ = size - count;
  filled_ = 0;
  return count;
}

size_t RecordLayer::take(const iovec* parts, size_t num_parts) {
  const size_t count = for_each_stretch(parts, num_parts, num_opened_, [&](char* to, size_t stretch) {
    std::memcpy(to, opened_, stretch);
    opened_ += stretch;
  });
  num_opened_ -= count;
  return count;
}

ssize_t RecordLayer::receive(int socket, const iovec* parts, size_t num_parts, int flags) {
  if (num_opened_ > 0) return static_cast<ssize_t>(take(parts, num_parts));
  bool has_moved = false;
  while (const size_t missing = num_missing()) {
    const ssize_t count = recv(socket, arriving_.data() + filled_, missing, flags);
    if (count < 0 && has_moved && (errno == EAGAIN || errno == EWOULDBLOCK)) errno = EINPROGRESS;
    if (count <= 0) return count;
    filled_ += static_cast<size_t>(count);
    has_moved = true;
    if (static_cast<size_t>(count) < missing) {
      errno = EINPROGRESS;
      return -1;
    }
  }
  return static_cast<ssize_t>(open_next(parts, num_parts));
}

std::string RecordLayer::seal(const char* data, size_t size) {
  std::string records;
  while (size > 0) {
    const iovec part{const_cast<char*>(data), size};
    seal_next(&part, 1);
    records.append(sealed_.data(), sealed_size_);
    num_sent_ = sealed_size_;
    data += sealed_plain_;
    size -= sealed_plain_;
  }
  return records;
}

std::string RecordLayer::open(const char* data, size_t size) {
  std::string plain;
  while (true) {
    const size_t missing = num_missing(), count = std::min(missing, size);
    if (missing == 0) {
      open_next(nullptr, 0);
      plain.append(opened_, num_opened_);
      num_opened_ = 0;
      continue;
    }
    if (size == 0) return plain;
    std::memcpy(arriving_.data() + filled_, data, count);
    filled_ += count;
    data += count;
    size -= count;
  }
}

ssize_t Wire::send(iovec* parts, size_t num_parts, int flags) const {
  if (records != nullptr) return records->send(socket, parts, num_parts, flags);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = num_parts;
  return sendmsg(socket, &message, flags);
}

ssize_t Wire::receive(iovec* parts, size_t num_parts, int flags) const {
  if (records != nullptr) return records->receive(socket, parts, num_parts, flags);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = num_parts;
  return recvmsg(socket, &message, flags);
}

}  // namespace elasticdl
