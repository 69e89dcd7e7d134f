// Ranks that are MPI processes, for layers on CPUs. Needs the library sluice::mpi (built where CMake finds an MPI; it is
// apart so that programs without MPI do not load one).
//
//   MPI_Init_thread(..., MPI_THREAD_SERIALIZED, ...);  // FUNNELED does where the layer is called by the main thread
//   Result<std::shared_ptr<Transport>> transport = mpi_transport(MPI_COMM_WORLD);
//   options.transport = *transport;
#pragma once

#include <mpi.h>

#include "sluice/transport.h"

namespace sluice {

struct MpiOptions {
  // How long a rank waits for the others, in any call, before it gives them up.
  double timeout_seconds = 30.0;
};

// Collective over `communicator`, which is duplicated: traffic of the layer and of its caller do not meet. The transport
// must be gone before MPI_Finalize, and calls of MPI by other threads meanwhile are the caller's to allow (thread level).
// MPI not initialised, or a time-out that is not between 0.001 and 86400 seconds, is kInvalidArgument; a rank that does not
// come is kPeerFailure.
//
// After a time-out the requests that did not end are cancelled where MPI can (receives) and left where it cannot; nothing
// collective is called any more, so that the process can end by MPI_Abort or by itself.
Result<std::shared_ptr<Transport>> mpi_transport(MPI_Comm communicator, const MpiOptions& options = {});

}  // namespace sluice
