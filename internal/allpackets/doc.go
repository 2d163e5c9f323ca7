// Package allpackets compares the rules in the kernel with package oracle, for every packet
// that a State distinguishes, and not for a few of them: each VIP, protocol, port and its
// neighbours, with each kind of source. It reads the rules back and interprets them, so that
// a packet costs microseconds. It has only tests.
package allpackets
