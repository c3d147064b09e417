// A TCP proxy in front of a server that can cut its connections: to the server, a client whose
// process or host is suddenly gone.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace dcp {

class TcpProxy {
 public:
  explicit TcpProxy(int server_port);
  ~TcpProxy();

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  // Resets every connection, both ways, and takes no more.
  void Cut();

 private:
  void Accept();
  void Forward(int from, int to);

  const int server_port_;
  int port_ = 0;
  int listener_ = -1;
  std::atomic<bool> cut_{false};
  std::mutex mutex_;
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
  std::thread acceptor_;
};

// A connected socket to 127.0.0.1:port.
int ConnectTo(int port);

}  // namespace dcp
