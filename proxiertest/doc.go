// Package proxiertest is for the tests of programs that embed serviceplane, and
// of engines for it.
//
// Service and Slice build API objects that can be read at the call site:
//
//	web := proxiertest.Service("default", "web",
//	        proxiertest.ClusterIPs("10.96.0.10"),
//	        proxiertest.Port("http", v1.ProtocolTCP, 80))
//	slice := proxiertest.Slice("default", "web", discovery.AddressTypeIPv4,
//	        proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
//	        proxiertest.Endpoint("10.244.1.2", proxiertest.OnNode("node")))
//
// RecordingEngine stands in for a data plane where only the decisions matter.
//
// Topology is a small dual-stack network of real hosts, in network namespaces of
// the test's own, and Conformance holds an engine against a table of what packets
// must experience there. Both need Linux and root; without them they skip, or
// fail when the environment has SERVICEPLANE_REQUIRE_KERNEL=1.
package proxiertest
