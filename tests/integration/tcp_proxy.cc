#include "tests/integration/tcp_proxy.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>

namespace dcp {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

}  // namespace

int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(port);
  REQUIRE(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

TcpProxy::TcpProxy(int server_port) : server_port_(server_port) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  REQUIRE(bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  REQUIRE(listen(listener_, 16) == 0);
  socklen_t size = sizeof(address);
  REQUIRE(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { Accept(); });
}

TcpProxy::~TcpProxy() {
  Cut();
  acceptor_.join();
  for (std::thread& t : threads_) t.join();
  for (const int fd : sockets_) close(fd);
  close(listener_);
}

void TcpProxy::Cut() {
  cut_ = true;
  const std::lock_guard lock(mutex_);
  for (const int fd : sockets_) {
    const linger reset{.l_onoff = 1, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    shutdown(fd, SHUT_RDWR);
  }
}

void TcpProxy::Accept() {
  while (!cut_) {
    pollfd wait{.fd = listener_, .events = POLLIN, .revents = 0};
    if (poll(&wait, 1, 20) != 1) continue;
    const int client = accept(listener_, nullptr, nullptr);
    const int server = ConnectTo(server_port_);
    const std::lock_guard lock(mutex_);
    sockets_.insert(sockets_.end(), {client, server});
    threads_.emplace_back([=, this] { Forward(client, server); });
    threads_.emplace_back([=, this] { Forward(server, client); });
  }
}

void TcpProxy::Forward(int from, int to) {
  std::vector<char> buffer(1 << 16);
  while (!cut_) {
    const ssize_t n = recv(from, buffer.data(), buffer.size(), 0);
    if (n <= 0) break;
    for (ssize_t sent = 0; sent < n;) {
      const ssize_t m =
          send(to, buffer.data() + sent, static_cast<std::size_t>(n - sent), MSG_NOSIGNAL);
      if (m <= 0) return;
      sent += m;
    }
  }
  shutdown(to, SHUT_WR);
}

}  // namespace dcp
