// Package hybrid makes one proxier.Engine of several for the same IP family: most service
// ports go to nftables, say, and to userspace those that are to be scaled from zero. The
// program says which, for example by an annotation of the Service.
//
// A service port that goes from one member to another is programmed there before it is
// taken away here. The members must not stand in each other's way where both have the same
// service port for a moment: they need Names and masquerade marks of their own.
//
// It builds everywhere, and programs what its members do.
package hybrid
