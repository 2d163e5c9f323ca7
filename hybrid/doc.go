// Package hybrid combines several engines for the same IP family into one proxier.Engine.
// For example, most service ports go to nftables, and those that are scaled from zero to
// userspace. The program chooses the engine, for example by an annotation of the Service, and for
// each kind of frontends: one engine may have the external IPs of a service port, for direct server return,
// and another one its ClusterIP. An engine that terminates connections, such as userspace, must have all
// frontends of a service port of UDP or none: connection tracking knows only one end of its flows.
//
// Frontends that move are programmed by their new member before the old one removes
// them. For a moment both have them, so the members need different Names and masquerade marks. What leaves
// ipvs with open connections refuses new ones until these have ended, at most after its Config.Drain.
//
// The package builds on all platforms.
package hybrid
