// Package proxier holds what all engines share: the Provider that an embedding program feeds with
// events, and the driver that turns events into Updates for an Engine. Every program with an engine
// needs it, and who writes one.
//
// A program that uses an engine of this library calls New of that engine's package, with
// the Config and the Deps of this one, and gets a *Proxier. A program with a data plane of
// its own implements Engine and calls New here: the Proxier tracks events, limits the rate
// of syncs, retries failures, and reports its Status. Package hybrid combines several
// Engines into one.
//
// This package does not access the kernel itself, and builds on all platforms.
//
// # Configs of engines
//
// The Config of each engine embeds the Config of this package. What only some engines have is beside it, in the same
// form in each:
//
//   - Fields FastPath… of nftables and ebpf let packets of established connections skip the node's rules, of service
//     ports with changetracker.ServicePort.FastPath. FastPathAfter turns on the flowtable, FastPathByBPF the program
//     of ebpf; FastPathDevice chooses the devices for both.
//   - NodePorts.Localhost asks every engine for node ports at 127.0.0.1 and ::1. Sockets serve them, by
//     localhost.Wrap as Deps.Wrap; at 127.0.0.1, iptables does so by rules with RouteLocalnet.
//   - Choose is a function of one service port, func(*desired.Service) T: of ipvs.Config it returns settings, of
//     ebpf.Sockets whether sockets are translated. It must be pure; several goroutines may call it at once. It reads,
//     for example, what Tracker.DecorateService has stored in Port.Ext from an annotation. choose of hybrid.New also
//     gets the kind of the frontends, and returns the engine.
package proxier
