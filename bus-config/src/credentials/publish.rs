//! From the authority to servers: the configuration they start with, and updates while they run.

use std::time::Duration;

use async_nats::Client;
use serde_json::Value;

use super::{Authority, Error};
use crate::accounts::Account;
use crate::subjects::CLAIMS_UPDATE;

/// How often servers compare their accounts with each other. A node that was away lets a credential in that was revoked
/// meanwhile until it has compared: the server's own two minutes would be too long.
const RESOLVER_INTERVAL: &str = "5s";
/// How long servers may take to accept an account's new token.
const UPDATE_DEADLINE: Duration = Duration::from_secs(10);

impl Authority {
    /// Configuration text for every server: who the operator is, and the accounts as of now. Contains no secret. Servers keep
    /// later versions of the accounts in `resolver_dir` and prefer them, so that a revocation outlives a restart.
    pub fn server_config(&self, resolver_dir: &str) -> Result<String, Error> {
        let mut preload = format!("  {}: {}\n", self.system.public_key(), self.system_token()?);
        for account in Account::ALL {
            preload += &format!("  {}: {}\n", self.account(account).public_key(), self.account_token(account)?);
        }
        Ok(format!(
            "operator: {}\nsystem_account: {}\nresolver {{ type: full, dir: {resolver_dir:?}, allow_delete: false, interval: \"{RESOLVER_INTERVAL}\" }}\n\
             resolver_preload {{\n{preload}}}\n",
            self.operator_token()?,
            self.system.public_key(),
        ))
    }

    /// Brings the accounts as they are now to all running servers, through a client of the system account. Revoked clients are
    /// disconnected by it at once.
    pub async fn publish(&self, system: &Client) -> Result<(), Error> {
        for account in Account::ALL {
            let failed = |reason: String| Error::NotTaken { account: account.name(), reason };
            let token = self.account_token(account)?;
            let max = system.server_info().max_payload;
            if max > 0 && token.len() > max {
                return Err(Error::TooManyRevocations { account: account.name(), len: token.len(), max });
            }
            let request = tokio::time::timeout(UPDATE_DEADLINE, system.request(CLAIMS_UPDATE, token.into()));
            let message =
                request.await.map_err(|_| failed("no answer".to_owned()))?.map_err(|error| failed(error.to_string()))?;
            let answer: Value = serde_json::from_slice(&message.payload).map_err(|error| failed(error.to_string()))?;
            if answer["data"]["code"] != 200 {
                return Err(failed(answer.to_string()));
            }
        }
        Ok(())
    }
}
