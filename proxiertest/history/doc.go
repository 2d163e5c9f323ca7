// Package history is for tests of an author's own engine: it runs random histories of a cluster, of the
// machine and of other programs against it. A history is a list of steps made from a seed:
// events of Services, EndpointSlices and the node, also without a pause, failures of calls to the
// kernel and of single Services, for some tries or for good, the death of the process, restarts,
// and changes by other programs before, during and after our own writes.
//
// At each step of kind Converge, all that may be programmed must be, while events still come. Then
// the kernel must hold what a new engine programs in an empty network namespace from the same
// objects, and connection tracking, health checks and announcements must have had exactly the calls
// that the objects require.
//
// The author implements Plane, whose engines send each call to the kernel through Calls. Test runs histories,
// TestEachCall lets each call fail, TestVerify and TestWatch let another program change the objects, and
// TestPlanted proves that such tests would find bugs. They need what the Plane needs.
package history
