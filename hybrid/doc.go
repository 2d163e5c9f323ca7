// Package hybrid combines several engines for the same IP family into one proxier.Engine.
// For example, most service ports go to nftables, and those that are scaled from zero to
// userspace. The program chooses the engine, for example by an annotation of the Service.
//
// A service port that moves is programmed by its new member before the old one removes
// it. For a moment both have it, so the members need different Names and masquerade marks.
//
// The package builds on all platforms.
package hybrid
