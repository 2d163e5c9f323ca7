// Package proxiertest helps to test programs that embed serviceplane, and engines.
//
// Service and Slice build API objects:
//
//	web := proxiertest.Service("default", "web",
//	        proxiertest.ClusterIPs("10.96.0.10"),
//	        proxiertest.Port("http", v1.ProtocolTCP, 80))
//	slice := proxiertest.Slice("default", "web", discovery.AddressTypeIPv4,
//	        proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
//	        proxiertest.Endpoint("10.244.1.2", proxiertest.OnNode("node")))
//
// RecordingEngine is an Engine that records what it should program.
//
// Topology is a small dual-stack network: each host is a network namespace.
// Conformance tests an engine in it, with the scenarios that docs/RULES.md lists as
// PKT-…. Both need Linux and root. Without these the test is skipped, or fails if the
// environment has SERVICEPLANE_REQUIRE_KERNEL=1.
package proxiertest
