// Package nftrace finds out which rule of nf_tables stops the connections of a canary: a drop or a
// reject in the table of another program, for instance. It follows packets as nft monitor trace
// does. The rules of iptables-nft are rules of nf_tables too; those of iptables-legacy and BPF
// programs are not. It is for programs with a canary on Linux.
//
//	canary.New(canary.Options{Explain: nftrace.Explain("")})
package nftrace
