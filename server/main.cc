#include "server/server_main.h"

int main(int argc, char** argv) { return dcp::ServerMain(argc, argv); }
